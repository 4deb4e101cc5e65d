import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { experimental_transcribe as transcribe, generateText, Output, stepCountIs, streamText, tool as aiTool } from "ai";
import { z } from "zod";

const { feature, client, model: name, base, question, picture, recording, varied } = JSON.parse(
  process.env.CELL,
);
const openai = createOpenAI({ baseURL: base, apiKey: "none" });
const compatible = createOpenAICompatible({
  name: "tiny",
  baseURL: base,
  apiKey: "none",
  supportsStructuredOutputs: true,
});
const model = client.endsWith("compatible") ? compatible(name) : openai(name);
const how = { model, maxRetries: 0, temperature: varied.temperature, maxOutputTokens: varied.max_tokens };
const weather = aiTool({
  description: "The weather of a city.",
  inputSchema: z.object({ city: z.enum(["Oslo", "Rome"]) }),
  execute: async ({ city }) => `4 degrees in ${city}`,
});
const output = Output.object({
  schema: z.object({ name: z.enum(["Oslo", "Rome"]), warm: z.boolean() }),
});
const show = async (part, shown = model) =>
  (
    await generateText({
      ...how,
      model: shown,
      messages: [{ role: "user", content: [{ type: "text", text: question }, part] }],
    })
  ).text;

const cells = {
  text: async () => (await generateText({ ...how, prompt: question })).text,
  stream: async () => {
    const pieces = [];
    for await (const piece of streamText({ ...how, prompt: question }).textStream) pieces.push(piece);
    return pieces;
  },
  image: () => show({ type: "image", image: picture }),
  // OpenAI's Responses API hears nothing, and so this client sends it no recordings.
  audio: () =>
    show(
      { type: "file", data: recording, mediaType: "audio/wav" },
      client.endsWith("compatible") ? model : openai.chat(name),
    ),
  tools: async () =>
    (await generateText({ ...how, prompt: question, tools: { weather }, stopWhen: stepCountIs(3) })).text,
  "forced tool": async () => {
    const { execute: _, ...unrun } = weather;
    const asked = { ...how, prompt: question, tools: { weather: unrun }, toolChoice: "required" };
    const [call] = (await generateText(asked)).toolCalls;
    return [call.toolName, call.input];
  },
  "structured output": async () => (await generateText({ ...how, prompt: question, output })).output,
  "tools, then structured": async () =>
    (await generateText({ ...how, prompt: question, output, tools: { weather }, stopWhen: stepCountIs(3) }))
      .output,
  logprobs: async () => {
    const providerOptions = { openai: { logprobs: true } };
    const asked = { ...how, model: openai.chat(name), prompt: question, providerOptions };
    const { logprobs } = (await generateText(asked)).providerMetadata.openai;
    return logprobs.map((one) => [one.token, one.logprob]);
  },
  transcription: async () =>
    (await transcribe({ model: openai.transcription(name), audio: recording, maxRetries: 0 })).text,
  Responses: async () => (await generateText({ ...how, prompt: question })).text,
};

console.log(JSON.stringify(await cells[feature]()));
