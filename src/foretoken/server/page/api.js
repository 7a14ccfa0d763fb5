// Requests to the server, and the objects of a stream.

import { $ } from "./parts.js";

export function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

/** What an answer that is no success says, as one sentence. */
async function trouble(response) {
  let said = "";
  try {
    said = (await response.json()).error.message;
  } catch {
    said = response.statusText || "no reason given";
  }
  const wait = response.headers.get("Retry-After");
  const hint = response.status === 401 ? " (put it under “API key”)" : wait ? ` (try again in ${wait} s)` : "";
  return `${response.status}: ${said}${hint}`;
}

export async function answered(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the server does not answer");
  }
  if (!response.ok) throw new Error(await trouble(response));
  return response;
}

const BROKEN = "the stream broke off before its end";

/** Objects of a stream.  One that ends without [DONE] has broken off, and that is an error. */
export async function* chunks(path, body, signal) {
  const response = await answered(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      throw new Error(BROKEN);
    });
    if (done) throw new Error(BROKEN);
    const events = (held + value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      const line = event.split("\n").find((one) => one.startsWith("data: "));
      if (!line) continue;
      if (line === "data: [DONE]") return;
      const data = JSON.parse(line.slice(6));
      if (data.error) throw new Error(data.error.message);
      yield data;
    }
  }
}

/** What a chunk brings, the same for completions and chat. */
export function read(chunk) {
  const choice = chunk.choices[0];
  const drafting = chunk.metrics?.speculative_decoding;
  if (!choice) return { text: "", ids: [], origins: [], rounds: [], why: "", drafting };
  const speculative = choice.speculative ?? {};
  return {
    text: choice.text ?? choice.delta?.content ?? "",
    ids: choice.token_ids ?? [],
    origins: choice.origins ?? [],
    rounds: speculative.rounds ?? [],
    why: speculative.why ?? "",
    finish: choice.finish_reason,
    drafting,
  };
}

/** Rounds with the tokens that were kept of each: a limit or a stop may cut the last one short. */
export function kept({ ids, origins, rounds, text }) {
  if (!rounds.length && ids.length) {
    const token = { text, id: ids[0], origin: origins[0] ?? "plain" };
    return [{ tokens: [], parents: [], p: [], q: [], texts: [], accepted: [], emitted: [token] }];
  }
  let from = 0;
  return rounds.map((round) => {
    const texts = [...round.accepted.map((node) => round.texts[node]), round.next_text];
    const emitted = texts.slice(0, Math.max(0, ids.length - from)).map((one, index) => ({
      text: one, id: ids[from + index], origin: origins[from + index] ?? "plain",
    }));
    from += emitted.length;
    return { ...round, emitted };
  });
}
