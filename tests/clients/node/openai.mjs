import OpenAI, { toFile } from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const { feature, model, question, picture, recording, tool, varied } = JSON.parse(process.env.CELL);
const client = new OpenAI({ maxRetries: 0 });
const ask = (content, options = {}) =>
  client.chat.completions.create({ model, messages: [{ role: "user", content }], ...options });
const textOf = (answer) => answer.choices[0].message.content;
const asked = { type: "text", text: question };
const City = z.object({ name: z.enum(["Oslo", "Rome"]), warm: z.boolean() });
const runTools = (options = {}) => {
  const weather = ({ city }) => `4 degrees in ${city}`;
  const run = { ...tool.function, function: weather, parse: JSON.parse };
  const asked = { model, messages: [{ role: "user", content: question }], ...options };
  return client.chat.completions
    .runTools({ ...asked, tools: [{ type: "function", function: run }] })
    .finalContent();
};

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
  tools: () => runTools(),
  "tools, then structured": async () =>
    JSON.parse(await runTools({ response_format: zodResponseFormat(City, "city") })),
  "forced tool": async () => {
    const answer = await ask(question, { tools: [tool], tool_choice: "required", ...varied });
    const call = answer.choices[0].message.tool_calls[0].function;
    return [call.name, call.arguments];
  },
  "structured output": async () => {
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
  transcription: async () => {
    const file = await toFile(Buffer.from(recording, "base64"), "a.wav");
    return (await client.audio.transcriptions.create({ model, file })).text;
  },
  Responses: async () => {
    const stream = client.responses.stream({ model, input: question });
    return (await stream.finalResponse()).output_text;
  },
};

console.log(JSON.stringify(await cells[feature]()));
