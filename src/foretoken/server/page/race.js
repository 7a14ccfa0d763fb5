// The race: plain against speculative decoding in pairs, until the interval of their ratio says something.

import { chunks, read } from "./api.js";
import { $, plural, say, sum } from "./parts.js";
import { state } from "./state.js";
import { FEWEST_PAIRS, isDecided, MOST_PAIRS, ratioInterval, raceWords } from "./statistics.js";

const LONGEST = 128;
const NAMES = ["plain", "spec"];

/** One lane: tokens and text as they come, with their times. */
async function lane(name, [path, body], signal) {
  const found = { ids: [], steps: [], took: 0, most: body.max_tokens, drafted: 0, accepted: 0 };
  state.lanes[name] = found;
  const began = performance.now();
  let text = "";
  for await (const chunk of chunks(path, body, signal)) {
    const one = read(chunk);
    text += one.text;
    found.ids.push(...one.ids);
    found.drafted += one.drafting?.num_draft_tokens ?? 0;
    found.accepted += one.drafting?.num_accepted_draft_tokens ?? 0;
    found.steps.push({ at: performance.now() - began, text, count: found.ids.length });
    showLane(name, found.steps.at(-1), found.most);
  }
  found.took = performance.now() - began;
  found.steps.push({ at: found.took, text, count: found.ids.length });
  showLane(name, found.steps.at(-1), found.most);
  return found;
}

function showLane(name, step, most) {
  $(`${name}-text`).textContent = step.text;
  $(`${name}-text`).scrollTop = $(`${name}-text`).scrollHeight;
  $(`${name}-bar`).style.width = `${100 * Math.min(1, step.count / most)}%`;
  $(`${name}-time`).textContent = `${plural(step.count, "token")}, ${(step.at / 1e3).toFixed(2)} s`;
}

/** Both lanes of one pair.  Who runs first changes, so that a machine that slows down favours none. */
async function pair(index, request, salt, signal) {
  const found = {};
  for (const name of index % 2 ? [...NAMES].reverse() : NAMES) {
    const [path, body] = request({ enabled: name === "spec" });
    // A salt of its own: no lane may read what another has cached, or draft from what it has written.
    const more = { max_tokens: Math.min(body.max_tokens, LONGEST), seed: body.seed ?? index, cache_salt: `${salt}-${index}-${name}` };
    found[name] = await lane(name, [path, { ...body, ...more }], signal);
  }
  return found;
}

const each = (one) => one.took / Math.max(1, one.ids.length);

/** Whether the texts of all pairs were the same. */
function sameWords(pairs) {
  for (const [index, { plain, spec }] of pairs.entries()) {
    const longest = Math.max(plain.ids.length, spec.ids.length);
    const place = Array.from({ length: longest }, (_, at) => plain.ids[at] !== spec.ids[at]).indexOf(true);
    if (place >= 0) return [false, `identical: no, in pair ${index + 1} they differ from token ${place + 1} of ${longest}`];
  }
  const count = sum(pairs.map(({ spec }) => spec.ids.length));
  return [true, `identical: yes, ${count} of ${count} tokens in ${plural(pairs.length, "pair")}`];
}

const drafted = (pairs) => sum(pairs.map(({ spec }) => spec.drafted));

function verdict(pairs, interval) {
  if (!drafted(pairs)) {
    return raceWords(interval, state.spec?.drafter ? "the controller chose plain decoding in every round" : "the server has no drafter");
  }
  return (sum(pairs.map(({ spec }) => spec.accepted)) ? "" : "No draft was accepted. ") + raceWords(interval);
}

/** Pairs until the interval is decided, or there is nothing to be decided, or there were enough. */
export async function race(request, signal) {
  const salt = `race-${Date.now()}`;
  const pairs = [];
  state.lanes = {};
  $("race-drawer").open = true;
  for (const name of NAMES) showLane(name, { text: "", count: 0, at: 0 }, 1);
  $("race-title").scrollIntoView({ block: "start" });
  $("identical").textContent = "\u00a0";
  $("verdict").className = "";
  $("verdict").textContent = "A first pair warms up, and is not counted …";
  say($("seed").value === "" ? "Racing with seeds 1, 2, 3, …: without a seed two texts may differ." : "Racing …");
  let interval = null;
  try {
    await pair(0, request, salt, signal);
    do {
      pairs.push(await pair(pairs.length + 1, request, salt, signal));
      interval = ratioInterval(pairs.map(({ plain, spec }) => each(plain) / each(spec)));
      const bounds = Number.isFinite(interval.high) ? `, interval ${interval.low.toFixed(2)} to ${interval.high.toFixed(2)}` : "";
      $("verdict").textContent = `Pair ${pairs.length} of at most ${MOST_PAIRS}: ratio ${interval.ratio.toFixed(2)}${bounds} …`;
    } while (!isEnough(pairs, interval));
  } catch (error) {
    $("verdict").textContent = error.name === "AbortError" ? "Stopped." : "Not finished.";
    throw error;
  }
  const [isSame, same] = sameWords(pairs);
  $("verdict").textContent = verdict(pairs, interval);
  $("identical").textContent = `${same}.`;
  $("identical").className = isSame ? "same" : "differ";
  say(`Race: ${$("verdict").textContent}`);
}

const isEnough = (pairs, interval) =>
  pairs.length >= MOST_PAIRS || isDecided(interval) || (pairs.length >= FEWEST_PAIRS && !drafted(pairs));

/** The last pair again at its recorded pace, stretched to be seen; at once where motion is not wanted. */
export function replay(done) {
  const { plain, spec } = state.lanes;
  const longest = Math.max(plain.took, spec.took);
  const stretch = matchMedia("(prefers-reduced-motion: reduce)").matches ? 0 : Math.max(1, 3000 / longest);
  const began = performance.now();
  const tick = () => {
    if (state.running) return;
    const now = stretch ? (performance.now() - began) / stretch : longest;
    for (const [name, found] of Object.entries({ plain, spec })) {
      const step = found.steps.findLast((one) => one.at <= now) ?? { text: "", count: 0 };
      showLane(name, { ...step, at: Math.min(now, found.took) }, found.most);
    }
    if (now < longest) requestAnimationFrame(tick);
    else done();
  };
  tick();
}
