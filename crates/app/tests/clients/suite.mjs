// A suite for the official JavaScript clients. Whatever is wrong throws.
// Usage: node suite.mjs URL KEY MODEL
import assert from "node:assert";
import OpenAI from "openai";
import Anthropic from "@anthropic-ai/sdk";

const [url, key, model] = process.argv.slice(2);
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const claude = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const parameters = {
  type: "object",
  properties: { city: { enum: ["Paris", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};

const whole = await openai.chat.completions.create({ model, messages, temperature: 0, max_tokens: 12 });
const text = whole.choices[0].message.content;
console.log("chat:", JSON.stringify(text));
let joined = "";
const stream = await openai.chat.completions.create({ model, messages, temperature: 0, max_tokens: 12, stream: true });
for await (const chunk of stream) joined += chunk.choices[0]?.delta?.content ?? "";
assert.equal(joined, text);

const tools = [{ type: "function", function: { name: "weather", parameters, strict: true } }];
const runner = openai.chat.completions.stream({ model, messages, tools, tool_choice: "required", parallel_tool_calls: false, temperature: 0, max_tokens: 100 });
const called = await runner.finalChatCompletion();
const call = called.choices[0].message.tool_calls[0];
assert.ok(["Paris", "Rome"].includes(JSON.parse(call.function.arguments).city));
assert.equal(called.choices[0].finish_reason, "tool_calls");

const response = await openai.responses.create({ model, input: "Say hello.", temperature: 0, max_output_tokens: 6 });
console.log("response:", JSON.stringify(response.output_text));
const events = openai.responses.stream({ model, input: "Say hello.", temperature: 0, max_output_tokens: 6 });
assert.equal((await events.finalResponse()).output_text, response.output_text);
await assert.rejects(openai.chat.completions.create({ model: "no-such", messages }), OpenAI.NotFoundError);

const message = await claude.messages.create({ model, messages, max_tokens: 12, temperature: 0 });
assert.ok(message.content[0].text.includes("Paris"));
const final = await claude.messages.stream({ model, messages, max_tokens: 12, temperature: 0 }).finalMessage();
assert.equal(final.content[0].text, message.content[0].text);
const used = await claude.messages
  .stream({ model, messages, max_tokens: 100, temperature: 0, tools: [{ name: "weather", input_schema: parameters }], tool_choice: { type: "any", disable_parallel_tool_use: true } })
  .finalMessage();
assert.ok(["Paris", "Rome"].includes(used.content.at(-1).input.city));
await assert.rejects(claude.messages.create({ model: "no-such", messages, max_tokens: 5 }), Anthropic.NotFoundError);
console.log("done");
