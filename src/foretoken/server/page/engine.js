// The engine, every second: counters, the queue, the controller.

import { answered, headers } from "./api.js";
import { drawPulse } from "./charts.js";
import { $, bytes, html, number, sum } from "./parts.js";
import { rate, state } from "./state.js";

function metric(text, name) {
  const pattern = new RegExp(`^foretoken:${name}(?:\\{[^}]*\\})? (\\S+)$`, "gm");
  return sum([...text.matchAll(pattern)].map((found) => Number(found[1])));
}

/** Ask how the engine is, and show it. Behind a gateway the report is one replica's, and the counters are those of all. */
export async function poll() {
  const options = { headers: headers(), signal: AbortSignal.timeout(5000) };
  const spec = await (await answered("v1/spec", options)).json();
  const counters = await (await answered("metrics", options)).text();
  state.model = spec.model;
  state.spec = spec;
  const pulse = {
    at: performance.now(), rounds: metric(counters, "rounds_total"), tokens: metric(counters, "generation_tokens_total"),
    running: metric(counters, "num_requests_running"), waiting: metric(counters, "num_requests_waiting"),
    bytes: metric(counters, "kv_cache_bytes"), replicas: metric(counters, "replicas_ready") || 1,
  };
  state.pulses = [...state.pulses, pulse].filter((one) => pulse.at - one.at < 61e3);
  showEngine(spec, pulse);
}

function showEngine(spec, pulse) {
  const { state: engine } = spec;
  $("model").textContent = spec.drafter ? `${spec.model} · drafter ${spec.drafter}` : `${spec.model} · no drafter`;
  $("live-state").textContent = engine.dead ? "stopped" : engine.draining ? "shutting down" : pulse.running ? "busy" : "idle";
  $("live-running").textContent = pulse.running;
  $("live-waiting").textContent = pulse.waiting;
  $("live-rounds").textContent = rate("rounds", 2.5).toFixed(0);
  $("live-tokens").textContent = rate("tokens", 10.5).toFixed(0);
  const facts = {
    "Drafter": spec.drafter ?? "none",
    "Verifier": spec.verifier,
    "Controller": spec.controller ?? "none",
    "Exact": spec.lossless ? "yes: the target's own distribution" : "no: lossy rules are allowed",
    "Keys and values": bytes(pulse.bytes) + (engine.kv_budget_bytes ? ` of ${bytes(pulse.replicas * engine.kv_budget_bytes)}` : ""),
    "Places": places(spec.limits, pulse),
    "Tokens/s": `${rate("tokens", 10.5).toFixed(1)} in finished requests, last 10 s`,
    ...flat(engine.controller ?? {}),
  };
  $("engine").replaceChildren(...Object.entries(facts).flatMap(([name, value]) => [html("dt", {}, name), html("dd", {}, String(value))]));
  drawPulse();
}

function places({ max_running: running, max_queued: waiting }, pulse) {
  const { replicas } = pulse;
  return `${pulse.running} of ${replicas * running} running, ${pulse.waiting} of ${replicas * waiting} waiting`;
}

/** Nested values as names and texts. */
function flat(value, name = "") {
  if (value === null || typeof value !== "object") {
    return { [name.replaceAll("_", " ")]: typeof value === "number" ? number(value) : String(value) };
  }
  if (Array.isArray(value) && value.every((one) => one === null || typeof one !== "object")) {
    return { [name.replaceAll("_", " ")]: value.map((one) => (typeof one === "number" ? number(one) : one)).join(", ") };
  }
  return Object.assign({}, ...Object.entries(value).map(([key, one]) => flat(one, name ? `${name} ${key}` : key)));
}

let isKnown = false;

/** Ask every second, as long as the page is seen; tell once that the first report is there, or that none is to be had. */
export async function watch(onFirst, onTrouble) {
  if (document.visibilityState === "visible") {
    const isFirst = !isKnown;
    try {
      await poll();
      isKnown = true;
      if (isFirst) onFirst();
    } catch (error) {
      const isRefused = error.message.startsWith("401");
      $("live-state").textContent = isRefused ? "needs an API key" : error.name === "TimeoutError" ? "no answer" : error.message;
      if (isFirst && !error.message.startsWith("503")) onTrouble();  // a server that is loading soon says more
    }
  }
  setTimeout(watch, 1000, onFirst, onTrouble);
}
