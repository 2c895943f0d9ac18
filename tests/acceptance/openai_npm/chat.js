// Asks for a chat twice, whole and as a stream: node chat.js BASE_URL BODY. Prints {"whole": the answer, "chunks": those of the stream}.
import OpenAI from "openai";

const [baseURL, text] = process.argv.slice(2);
const body = JSON.parse(text);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const whole = await client.chat.completions.create(body);
const chunks = [];
for await (const chunk of await client.chat.completions.create({ ...body, stream: true, stream_options: { include_usage: true } })) {
  chunks.push(chunk);
}
console.log(JSON.stringify({ whole, chunks }));
