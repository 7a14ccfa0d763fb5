// What the page knows: the server's last report, the answer that is shown, and the race.

export const state = {
  model: null, spec: null, answer: { rounds: [], text: "" }, chosen: -1, drawn: null, running: null, due: 0, pulses: [], lanes: {},
};

export const isChat = () => document.querySelector("input[name=mode]:checked").value === "chat";

/** Growth of a counter per second over the last so many seconds; a lost replica takes its share of a counter with it. */
export function rate(name, seconds, end = state.pulses.length - 1) {
  const last = state.pulses[end];
  const first = state.pulses.find((one) => last.at - one.at <= 1e3 * seconds);
  return last === first ? 0 : Math.max(0, (1e3 * (last[name] - first[name])) / (last.at - first.at));
}
