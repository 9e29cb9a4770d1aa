// Sends one request repeatedly while the server is busy with others, and counts the unique answers.

import { Answer } from "./answer.js";
import { pause } from "./client.js";
import { keepBusy } from "./traffic.js";

// Together one less than the six connections that browsers keep to a server.
const REPEATERS = 2;
const BACKGROUND_CLIENTS = 3;

/** The answers counted so far. */
export class Tally {
  answers = 0;
  unique = new Map(); // from a digest to { digest, answer: the first one, count }, in order of arrival
  batches = new Map(); // from a batch size to the number of the answers' tokens computed at that size
  fingerprints = new Set();
  background = { requests: 0, samples: 0, abandoned: 0, refused: 0 };

  add(answer) {
    this.answers += 1;
    this.fingerprints.add(answer.fingerprint);
    for (const size of answer.batches) this.batches.set(size, (this.batches.get(size) ?? 0) + 1);
    const digest = answer.digest;
    const entry = this.unique.get(digest) ?? { digest, answer, count: 0 };
    entry.count += 1;
    this.unique.set(digest, entry);
  }

  get texts() {
    return new Set(Array.from(this.unique.values(), ({ answer }) => answer.text)).size;
  }

  get smallestBatch() {
    return Math.min(...this.batches.keys());
  }

  get largestBatch() {
    return Math.max(...this.batches.keys());
  }
}

/** Sends one request and returns its answer. Calls `onChunk` with the answer so far after each chunk. */
export async function ask(client, { path, body }, signal, onChunk = () => {}) {
  const answer = new Answer();
  for await (const chunk of client.stream(path, body, signal)) {
    answer.add(chunk);
    onChunk(answer);
  }
  return answer;
}

/**
 * Sends a request `total` times, and counts the answers in `tally`.
 *
 * `experiment` has the `model`, the `request`, its `prompt`, with which some background requests begin, and `total`.
 * Calls `onProgress` with `false` after each answer, and with `true` while the server's queue is full.
 */
export async function prove(client, experiment, tally, signal, onProgress) {
  const { model, request, prompt, total } = experiment;
  const finished = new AbortController();
  const stopped = AbortSignal.any([signal, finished.signal]);
  let sent = 0;
  const repeat = async () => {
    while (sent < total) {
      sent += 1;
      tally.add(await askUntilAnswered(client, request, stopped, () => onProgress(true)));
      onProgress(false);
    }
  };
  const background = Array.from({ length: BACKGROUND_CLIENTS }, () =>
    keepBusy(client, model, prompt, tally.background, stopped),
  );
  const repeaters = Array.from({ length: REPEATERS }, repeat);
  try {
    await Promise.race([Promise.all(repeaters), ...background]); // background requests end only with errors
  } finally {
    finished.abort();
    await Promise.allSettled([...repeaters, ...background]);
  }
}

async function askUntilAnswered(client, request, signal, onFullQueue) {
  for (;;) {
    try {
      return await ask(client, request, signal);
    } catch (error) {
      if (error.status !== 429) throw error;
      onFullQueue();
      await pause(1000 * error.seconds, signal);
    }
  }
}
