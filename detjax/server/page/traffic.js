// Requests that nobody asked: what a server is busy with while one request is asked again and again.

import { pause } from "./client.js";

const MOST_SAMPLES = 8; // of a request; browsers keep few connections to a server, but samples of a request are many
const WORDS =
  "a an and as at be but by come day death do eyes fair for from give go good hand have he heart heaven her his I if " +
  "in is it king know let life light live lord love man me more my night no not of on one or our out queen say see " +
  "shall she sleep so speak stand sun sweet than that the thee their then there they this thou thy time to tongue " +
  "true upon was we well what when where which who will with word world would you your , . ; ! ?";
const VOCABULARY = WORDS.split(" ");

const below = (limit) => Math.floor(Math.random() * limit);
const chance = (probability) => Math.random() < probability;

/**
 * Keeps one random request after the other on its way, with pauses, until the signal.
 *
 * `counts` is told what became of them: `requests`, their `samples`, and how many were `abandoned` midway or `refused`.
 */
export async function keepBusy(client, model, prompt, counts, signal) {
  for (;;) {
    const body = anyRequest(model, prompt);
    counts.requests += 1;
    counts.samples += body.prompt.length * body.n;
    const begun = performance.now();
    try {
      counts.abandoned += await sent(client, body, signal);
    } catch (error) {
      signal.throwIfAborted();
      if (error.status < 400 || error.status >= 500) throw error;
      counts.refused += 1; // there is no room, or none for so many samples
      await pause(1000 * error.seconds, signal);
    }
    // There has to be silence, too: some answers should be computed alone.
    if (chance(0.3)) await pause(Math.random() * 2 * (performance.now() - begun), signal);
  }
}

/** Whether the rest was not waited for. */
async function sent(client, body, signal) {
  const leaving = new AbortController();
  const until = AbortSignal.any([signal, leaving.signal]);
  const abandoned = chance(0.25);
  if (chance(0.5)) {
    let left = abandoned ? 1 + below(body.prompt.length * body.n * body.max_tokens) : Infinity;
    for await (const _ of client.stream("/v1/completions", body, until)) if (--left <= 0) return true;
    return false;
  }
  const timer = abandoned ? setTimeout(() => leaving.abort(), below(20 * body.max_tokens)) : undefined;
  try {
    await client.whole("/v1/completions", body, until);
  } catch (error) {
    if (!leaving.signal.aborted || signal.aborted) throw error;
    return true;
  } finally {
    clearTimeout(timer);
  }
  return false;
}

function anyRequest(model, prompt) {
  const room = model.max_model_len ?? 512;
  const count = 1 + below(4);
  return {
    model: model.id,
    prompt: Array.from({ length: count }, () => anyPrompt(prompt, room)),
    n: 1 + below(MOST_SAMPLES / count),
    max_tokens: 1 + below(Math.min(64, room / 4)),
    temperature: chance(0.25) ? 0 : 1,
    seed: below(2 ** 31),
  };
}

/** Words without sense; some begin as the prompt that is proved, so that they share its pages. */
function anyPrompt(prompt, room) {
  // A character has 4 bytes at most, and a byte is a token at most.
  let text = chance(0.25) ? [...prompt].slice(0, 1 + below(Math.min(200, room / 16))).join("") : "";
  const characters = 1 + below(Math.min(600, room / 2));
  while (text.length < characters) text += (text && " ") + VOCABULARY[below(VOCABULARY.length)];
  return text;
}
