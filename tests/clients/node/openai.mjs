import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const { feature, model, question, picture, recording, tool, varied } = JSON.parse(process.env.CELL);
const client = new OpenAI({ maxRetries: 0 });
const ask = (content, options = {}) =>
  client.chat.completions.create({ model, messages: [{ role: "user", content }], ...options });
const textOf = (answer) => answer.choices[0].message.content;
const asked = { type: "text", text: question };

const cells = {
  text: async () => textOf(await ask(question)),
  stream: async () => {
    const pieces = [];
    for await (const chunk of await ask(question, { stream: true }))
      if (chunk.choices[0].delta.content) pieces.push(chunk.choices[0].delta.content);
    return pieces;
  },
  image: async () =>
    textOf(await ask([asked, { type: "image_url", image_url: { url: picture } }])),
  audio: async () =>
    textOf(await ask([asked, { type: "input_audio", input_audio: { data: recording, format: "wav" } }])),
  tools: async () => {
    const weather = ({ city }) => `4 degrees in ${city}`;
    const runner = client.chat.completions.runTools({
      model,
      messages: [{ role: "user", content: question }],
      tools: [
        {
          type: "function",
          function: { ...tool.function, function: weather, parse: JSON.parse },
        },
      ],
    });
    return await runner.finalContent();
  },
  "forced tool": async () => {
    const answer = await ask(question, { tools: [tool], tool_choice: "required", ...varied });
    const call = answer.choices[0].message.tool_calls[0].function;
    return [call.name, call.arguments];
  },
  "structured output": async () => {
    const City = z.object({ name: z.enum(["Oslo", "Rome"]), warm: z.boolean() });
    const answer = await client.chat.completions.parse({
      model,
      messages: [{ role: "user", content: question }],
      response_format: zodResponseFormat(City, "city"),
      ...varied,
    });
    return answer.choices[0].message.parsed;
  },
  logprobs: async () => {
    const answer = await ask(question, { logprobs: true });
    return answer.choices[0].logprobs.content.map((one) => [one.token, one.logprob]);
  },
  Responses: async () => {
    const stream = client.responses.stream({ model, input: question });
    return (await stream.finalResponse()).output_text;
  },
};

if (feature === undefined) throw new Error("no feature");
console.log(JSON.stringify(await cells[feature]()));
