// The simulator: the formulas of foretoken.lab.plan (tests compare both on a grid), and the page that shows them.
"use strict";
const formulas = (() => {
  const sum = (values) => values.reduce((total, value) => total + value, 0);

  // Tokens a round.  `acceptance` is alpha, or shares of rounds accepted at least 1, 2, ... far.
  const extended = (shares, k) => {
    const known = shares.slice(0, k);
    const before = known.length > 1 ? known[known.length - 2] : 1;
    const step = known.length && before > 0 ? known[known.length - 1] / before : 0;
    while (known.length < k) known.push((known[known.length - 1] ?? 0) * step);
    return known;
  };
  const reached = (acceptance, k) =>
    Array.isArray(acceptance) ? extended(acceptance, k) : Array.from({ length: k }, (_, i) => acceptance ** (i + 1));
  const chainTokens = (acceptance, k) => {
    if (Array.isArray(acceptance)) return 1 + sum(extended(acceptance, k));
    if (k === 0 || acceptance === 0 || acceptance === 1) return 1 + k * acceptance;
    return -Math.expm1((k + 1) * Math.log(acceptance)) / (1 - acceptance); // equation 1, without cancellation near 1
  };

  // v(n): straight lines between measured points, beyond them along the last one; in calls with one token.
  const callCost = (points, n) => {
    const counts = Object.keys(points).map(Number).sort((a, b) => a - b);
    const first = counts[0];
    if (n <= first) return points[first];
    if (counts.length === 1) return points[first] * (n / first);
    const above = counts.findIndex((count) => count >= n);
    const high = above < 0 ? counts.length - 1 : above;
    const [left, right] = [counts[high - 1], counts[high]];
    return points[left] + Math.max((points[right] - points[left]) / (right - left), 0) * (n - left);
  };
  const relative = (points) => (nodes, batch = 1) => callCost(points, nodes * batch) / callCost(points, 1);

  // A round in plain rounds of the batch: the tokens that it must give to pay.
  const roundCost = (given, steps, nodes, batch) => {
    if (steps === 0) return 1;
    const plain = given.v(1, batch);
    return (given.v(nodes, batch) + given.c * plain * steps + given.overhead) / plain;
  };
  const chainSpeedup = (given, k, batch) => chainTokens(given.acceptance, k) / roundCost(given, k, k + 1, batch);
  const bestLength = (given, longest, batch) => {
    let best = 0;
    for (let k = 1; k <= longest; k += 1) if (chainSpeedup(given, k, batch) > chainSpeedup(given, best, batch)) best = k;
    return best;
  };

  // From where a chain of k is slower than plain decoding; null where that cannot happen.
  const breakEven = (given, k, batch) => {
    const cost = roundCost(given, k, k + 1, batch), plain = given.v(1, batch);
    const spare = chainTokens(given.acceptance, k) - cost;
    const c = given.c + spare / k, overhead = given.overhead + spare * plain;
    let tooMany = null;
    for (let size = 1; spare > 0 && size <= 4096 && tooMany === null; size *= 2) {
      if (size > batch && chainSpeedup(given, k, size) < 1) tooMany = size;
    }
    return { alpha: alphaFor(cost, k), c: c >= 0 ? c : null, overhead: overhead >= 0 ? overhead : null, batch: tooMany };
  };
  const alphaFor = (tokens, k) => {
    if (Number.isNaN(tokens) || tokens > k + 1) return null;
    if (tokens <= 1) return 0;
    let [low, high] = [0, 1];
    for (let turn = 0; turn < 200; turn += 1) {
      const middle = 0.5 * (low + high);
      if (middle === low || middle === high) break;
      if (chainTokens(middle, k) > tokens) high = middle;
      else low = middle;
    }
    return 0.5 * (low + high);
  };

  // A tree by its child counts per level; `siblings` are the chances of the first, second, ... child, or null.
  const tree = (given, widths, siblings, batch) => {
    let [level, nodes, tokens, before] = [1, 1, 1, 1];
    let share = 1; // chance that a given level is reached
    reached(given.acceptance, widths.length).forEach((s, depth) => {
      const rate = before > 0 ? s / before : 0;
      before = s;
      const chances = Array.from({ length: widths[depth] }, (_, rank) => siblings ? siblings[rank] : rate * (1 - rate) ** rank);
      share *= sum(chances);
      tokens += share;
      level *= widths[depth];
      nodes += level;
    });
    return { nodes: nodes - 1, tokens, speedup: tokens / roundCost(given, widths.length, nodes, batch) };
  };

  return { chainTokens, callCost, relative, roundCost, chainSpeedup, bestLength, breakEven, tree };
})();

const simulate = (page) => {
  const LONGEST = 16;
  const byId = (id) => page.getElementById(id);
  const curves = JSON.parse(byId("sim-curves").textContent);
  const form = byId("sim-form"), field = (name) => form.elements[name];
  const number = (value, digits = 2) => value.toFixed(digits);
  const percent = (value) => `${Math.round(100 * value)} %`;

  curves.forEach((curve, i) => field("curve").add(new Option(`${curve.model}: ${curve.how}`, i)));
  field("curve").add(new Option("flat, as in the papers", "flat"));
  field("curve").add(new Option("my own, from foretoken doctor", "own"));

  // What the form says, or a sentence about what is wrong with it.
  const list = (text) => text.split(/[,x×\s]+/).filter(Boolean).map(Number);
  const points = () => {
    const choice = field("curve").value;
    if (choice === "flat") return { 1: 1, 2: 1 };
    if (choice !== "own") return curves[choice].ms;
    const pairs = field("own").value.split(",").map((pair) => pair.split(":").map(Number));
    const right = pairs.every(([n, cost]) => Number.isInteger(n) && n > 0 && cost > 0 && Number.isFinite(cost));
    if (!right || !pairs.some(([n]) => n === 1)) throw new Error("v(n) is points n:cost that begin at 1, such as 1:20,8:25,32:60");
    return Object.fromEntries(pairs);
  };
  const read = () => {
    const measured = points(), batch = Number(field("batch").value);
    const widths = list(field("tree").value), siblings = field("siblings").value.trim() ? list(field("siblings").value) : null;
    if (!Number.isInteger(batch) || batch < 1 || batch > 4096) throw new Error("the batch is a whole number from 1 to 4096");
    if (!widths.length || !widths.every((w) => Number.isInteger(w) && w > 0) || widths.reduce((a, b) => a * b, 1) > 4096) {
      throw new Error("a tree is child counts per level, such as 3x2x1, with at most 4096 leaves");
    }
    if (siblings && (siblings.length < Math.max(...widths) || !siblings.every((s) => s >= 0) || siblings.reduce((a, b) => a + b) > 1)) {
      throw new Error(`siblings need ${Math.max(...widths)} chances that sum to at most 1, such as 0.6,0.15,0.05`);
    }
    const [alpha, c, overhead, k] = ["alpha", "c", "overhead", "k"].map((name) => Number(field(name).value));
    return { given: { acceptance: alpha, c, overhead, v: formulas.relative(measured) }, measured, alpha, k, batch, widths, siblings };
  };

  const answer = (now) => {
    const { given, k, batch } = now, plain = given.v(1, batch);
    const best = formulas.bestLength(given, LONGEST, batch), speed = formulas.chainSpeedup(given, k, batch);
    const found = formulas.tree(given, now.widths, now.siblings, batch), limits = formulas.breakEven(given, k, batch);
    const choices = [["plain decoding", 1], [`a chain of ${best}`, best ? formulas.chainSpeedup(given, best, batch) : 0], [`the tree ${now.widths.join("x")}`, found.speedup]];
    const [name, gain] = choices.reduce((a, b) => (b[1] > a[1] ? b : a));
    const e = number(formulas.chainTokens(given.acceptance, k)), v = number(given.v(k + 1, batch) / plain);
    const show = (id, text) => { byId(id).textContent = text; };
    show("sim-tokens", e);
    show("sim-speedup", `${number(speed)}×`);
    byId("sim-speedup").className = speed >= 1 ? "sim-gain" : "sim-loss";
    show("sim-best", gain > 1 ? `${name}: ${number(gain)}×` : "plain decoding: nothing pays here");
    show("sim-tree", `${found.nodes} nodes, ${number(found.tokens)} tokens a round, ${number(found.speedup)}×`);
    show("sim-even", [
      limits.alpha === null ? "no α is enough" : `α above ${percent(limits.alpha)}`,
      limits.c === null ? "no drafter is cheap enough" : `c below ${number(limits.c)}`,
      ...(limits.batch === null ? [] : [`a batch below ${limits.batch}`]),
    ].join(", "));
    show("sim-e", `E = (1 − α^${k + 1}) / (1 − α) = ${e}`);
    show("sim-s", `S = E / (v + c·k + o) = ${e} / (${v} + ${number(given.c * k)} + ${number(given.overhead / plain)}) = ${number(speed)}`);
    const known = Math.max(...Object.keys(now.measured).map(Number)), most = batch * (Math.max(k, found.nodes) + 1);
    show("sim-note", most > known && field("curve").value !== "flat" ? `v(n) is measured up to ${known} tokens and continued along its last slope up to ${most}.` : "");
    if (!["flat", "own"].includes(field("curve").value)) {
      const ms = formulas.callCost(now.measured, batch);
      show("sim-speed", `plain ${number(1000 * batch / ms, 0)} tokens/s, with drafts of ${k}: ${number(1000 * batch * speed / ms, 0)}`);
    } else show("sim-speed", "");
    draw(given, k, best, batch);
  };

  // Speed-up against draft length: the chosen and the best length are marked.
  const draw = (given, k, best, batch) => {
    const picture = byId("sim-chart"), [width, height, left, bottom] = [Math.max(280, picture.clientWidth), 250, 44, 34];
    const speeds = Array.from({ length: LONGEST + 1 }, (_, i) => formulas.chainSpeedup(given, i, batch));
    const top = Math.max(1.5, Math.ceil(2 * Math.max(...speeds)) / 2);
    const x = (i) => left + (i * (width - left - 14)) / LONGEST, y = (s) => height - bottom - (s * (height - bottom - 14)) / top;
    const part = (name, attributes, text = "") => {
      const made = page.createElementNS(picture.namespaceURI, name);
      for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
      made.textContent = text;
      return made;
    };
    const parts = [];
    for (let s = 0; s <= top; s += top > 4 ? 1 : 0.5) {
      parts.push(part("line", { x1: left, x2: width - 14, y1: y(s), y2: y(s), class: s === 1 ? "sim-one" : "sim-grid" }));
      parts.push(part("text", { x: left - 6, y: y(s) + 4, "text-anchor": "end" }, `${s}×`));
    }
    for (let i = 0; i <= LONGEST; i += 2) parts.push(part("text", { x: x(i), y: height - bottom + 18, "text-anchor": "middle" }, String(i)));
    parts.push(part("text", { x: width - 14, y: height - 2, "text-anchor": "end" }, "draft tokens a round, k"));
    parts.push(part("polyline", { points: speeds.map((s, i) => `${x(i)},${y(s)}`).join(" "), class: "sim-line" }));
    parts.push(part("circle", { cx: x(best), cy: y(speeds[best]), r: 8, class: "sim-ring" }));
    parts.push(part("circle", { cx: x(k), cy: y(speeds[k]), r: 4.5, class: "sim-dot" }));
    picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    picture.replaceChildren(...parts);
    picture.setAttribute("aria-label", `speed-up by draft length: ${speeds.map((s) => number(s)).join(", ")}`);
  };

  const update = () => {
    for (const name of ["alpha", "c", "overhead", "k"]) byId(`sim-${name}-now`).textContent = field(name).value;
    byId("sim-own").hidden = field("curve").value !== "own";
    byId("sim-machine").textContent = curves[field("curve").value]?.machine ?? "";
    let wrong = "";
    try {
      answer(read());
    } catch (error) {
      wrong = error.message;
    }
    byId("sim-wrong").textContent = wrong;
    byId("sim-results").classList.toggle("sim-stale", wrong !== "");
  };
  form.addEventListener("input", update);
  page.defaultView.addEventListener("resize", update);
  form.addEventListener("submit", (event) => event.preventDefault());
  update();
};

if (typeof module !== "undefined") module.exports = formulas;
if (typeof document !== "undefined" && document.getElementById("sim-form")) simulate(document);
