// Two tools through the AI SDK, with the provider of any of the three wires, streamed or not.
// node ai_sdk.mjs TASK FOLDER WIRE [stream]: the packages are those of the folder.
import { createRequire } from "node:module";

const [task, folder, wire, stream] = process.argv.slice(2);
const require = createRequire(folder);
const { generateText, stepCountIs, streamText, tool } = require("ai");
const { z } = require("zod");
const { createOpenAI } = require("@ai-sdk/openai");
const { createAnthropic } = require("@ai-sdk/anthropic");

const model = {
  chat: () => createOpenAI().chat("policy"),
  responses: () => createOpenAI()("policy"),
  stateless: () => createOpenAI()("policy"),
  messages: () => createAnthropic({ baseURL: `${process.env.ANTHROPIC_BASE_URL}/v1` })("policy"),
}[wire]();
const add = tool({
  description: "Adds two numbers.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => a + b,
});
const options = {
  model,
  system: "Use the tool.",
  prompt: task,
  tools: { add },
  stopWhen: stepCountIs(9),
  providerOptions: wire === "stateless" ? { openai: { store: false } } : {},
};
if (stream) {
  const run = streamText({ ...options, onError: ({ error }) => { throw error; } });
  await run.consumeStream();
  console.log(await run.text);
} else {
  console.log((await generateText(options)).text);
}
