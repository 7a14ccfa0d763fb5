// Intervals: what a few counts and a few timings say.

/** 95 % interval of a share, by Wilson. */
export function wilson(hits, tries) {
  const z = 1.959964;
  const rate = hits / tries;
  const middle = rate + (z * z) / (2 * tries);
  const half = z * Math.sqrt((rate * (1 - rate)) / tries + (z * z) / (4 * tries * tries));
  const whole = 1 + (z * z) / tries;
  return [Math.max(0, (middle - half) / whole), Math.min(1, (middle + half) / whole)];
}

export const FEWEST_PAIRS = 3;
export const MOST_PAIRS = 12;

/**
 * Quantiles of Student's t at 1 - .025/10, for 3 to 12 pairs.  The race looks at its interval after each of these, and
 * stops at the first that excludes 1: each look gets a tenth of the 5 %, so that all of them together are wrong in at
 * most 5 % of races.
 */
const T = [14.089, 7.453, 5.598, 4.773, 4.317, 4.029, 3.833, 3.69, 3.581, 3.497];

/** Geometric mean of ratios with its interval; without one as long as there are too few. */
export function ratioInterval(ratios) {
  const logs = ratios.map(Math.log);
  const count = logs.length;
  const mean = logs.reduce((total, one) => total + one, 0) / count;
  if (count < FEWEST_PAIRS) return { count, ratio: Math.exp(mean), low: 0, high: Infinity };
  const spread = Math.sqrt(logs.reduce((total, one) => total + (one - mean) ** 2, 0) / (count - 1));
  const half = (T[Math.min(count, MOST_PAIRS) - FEWEST_PAIRS] * spread) / Math.sqrt(count);
  return { count, ratio: Math.exp(mean), low: Math.exp(mean - half), high: Math.exp(mean + half) };
}

/** Whether the interval lies on one side of 1. */
export const isDecided = ({ low, high }) => low > 1 || high < 1;

/** What a race has shown, in words; without drafts its ratio is no finding, wherever the interval lies. */
export function raceWords({ count, ratio, low, high }, noDrafts = "") {
  const between = `95 % interval ${low.toFixed(2)} to ${high.toFixed(2)}, ${count} pairs`;
  if (noDrafts) return `No draft was used: ${noDrafts}. The ratio of ${ratio.toFixed(2)} is noise and the controller's own cost (${between}).`;
  if (low > 1) return `Speculative is faster: ${ratio.toFixed(2)} times as fast as plain (${between}).`;
  if (high < 1) return `Speculative is slower: ${ratio.toFixed(2)} of plain's speed (${between}).`;
  return `No difference can be told: speculative has ${ratio.toFixed(2)} of plain's speed, and the interval contains 1 (${between}).`;
}
