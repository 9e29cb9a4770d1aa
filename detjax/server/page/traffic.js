// Random background requests that keep the server busy while one request is repeated.

import { pause } from "./client.js";

const MAX_SAMPLES = 8; // of a request; browsers open few connections, so each request has several samples
const WORDS =
  "a an and as at be but by come day death do eyes fair for from give go good hand have he heart heaven her his I if " +
  "in is it king know let life light live lord love man me more my night no not of on one or our out queen say see " +
  "shall she sleep so speak stand sun sweet than that the thee their then there they this thou thy time to tongue " +
  "true upon was we well what when where which who will with word world would you your , . ; ! ?";
const VOCABULARY = WORDS.split(" ");

const below = (limit) => Math.floor(Math.random() * limit);
const chance = (probability) => Math.random() < probability;

/**
 * Sends random requests in sequence, with pauses, until the signal aborts.
 *
 * `counts` counts the `requests`, their `samples`, and how many were `abandoned` midway or `refused`.
 */
export async function keepBusy(client, model, prompt, counts, signal) {
  for (;;) {
    const body = randomRequest(model, prompt);
    counts.requests += 1;
    counts.samples += body.prompt.length * body.n;
    const start = performance.now();
    try {
      counts.abandoned += await send(client, body, signal);
    } catch (error) {
      signal.throwIfAborted();
      if (error.status < 400 || error.status >= 500) throw error;
      counts.refused += 1; // the queue is full, or smaller than the request
      await pause(1000 * error.seconds, signal);
    }
    // Pauses, so that some answers are computed alone.
    if (chance(0.3)) await pause(Math.random() * 2 * (performance.now() - start), signal);
  }
}

/** Sends a request, and returns whether it was abandoned midway. */
async function send(client, body, signal) {
  const abandoning = new AbortController();
  const stopped = AbortSignal.any([signal, abandoning.signal]);
  const abandoned = chance(0.25);
  if (chance(0.5)) {
    let remaining = abandoned ? 1 + below(body.prompt.length * body.n * body.max_tokens) : Infinity;
    for await (const _ of client.stream("/v1/completions", body, stopped)) if (--remaining <= 0) return true;
    return false;
  }
  const timer = abandoned ? setTimeout(() => abandoning.abort(), below(20 * body.max_tokens)) : undefined;
  try {
    await client.complete("/v1/completions", body, stopped);
  } catch (error) {
    if (!abandoning.signal.aborted || signal.aborted) throw error;
    return true;
  } finally {
    clearTimeout(timer);
  }
  return false;
}

function randomRequest(model, prompt) {
  const room = model.max_model_len ?? 512;
  const count = 1 + below(4);
  return {
    model: model.id,
    prompt: Array.from({ length: count }, () => randomPrompt(prompt, room)),
    n: 1 + below(MAX_SAMPLES / count),
    max_tokens: 1 + below(Math.min(64, room / 4)),
    temperature: chance(0.25) ? 0 : 1,
    seed: below(2 ** 31),
  };
}

/** Random words. Some prompts begin like the repeated one, so that they share its pages. */
function randomPrompt(prompt, room) {
  // A character has at most 4 bytes, and a byte is at most one token.
  let text = chance(0.25) ? [...prompt].slice(0, 1 + below(Math.min(200, room / 16))).join("") : "";
  const characters = 1 + below(Math.min(600, room / 2));
  while (text.length < characters) text += (text && " ") + VOCABULARY[below(VOCABULARY.length)];
  return text;
}
