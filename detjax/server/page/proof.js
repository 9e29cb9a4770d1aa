// One request, asked again and again while the server is busy with others, and what is counted of its answers.

import { Answer } from "./answer.js";
import { pause } from "./client.js";
import { keepBusy } from "./traffic.js";

// Together one less than the six connections that browsers keep to a server.
const ASKING = 2;
const OTHERS = 3;

/** What was counted so far. */
export class Tally {
  answers = 0;
  unique = new Map(); // digest: { digest, answer: the first of them, count }, in the order in which they came
  batches = new Map(); // how many samples a step had: how many tokens of answers it computed
  fingerprints = new Set();
  others = { requests: 0, samples: 0, abandoned: 0, refused: 0 };

  add(answer) {
    this.answers += 1;
    this.fingerprints.add(answer.fingerprint);
    for (const size of answer.batches) this.batches.set(size, (this.batches.get(size) ?? 0) + 1);
    const digest = answer.digest;
    const same = this.unique.get(digest) ?? { digest, answer, count: 0 };
    same.count += 1;
    this.unique.set(digest, same);
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

/** The answer to one request, as `client.stream` takes it; `told` is called with it whenever a chunk has come. */
export async function ask(client, { path, body }, signal, told = () => {}) {
  const answer = new Answer();
  for await (const chunk of client.stream(path, body, signal)) {
    answer.add(chunk);
    told(answer);
  }
  return answer;
}

/**
 * Asks until there are `total` answers, and counts them in `tally`.
 *
 * `prompt` is the request's; some of the others begin like it. `told` is called after each answer, and with `true`
 * when the server has no room and is waited for.
 */
export async function prove(client, model, request, prompt, total, tally, signal, told) {
  const over = new AbortController();
  const until = AbortSignal.any([signal, over.signal]);
  let begun = 0;
  const asking = async () => {
    while (begun < total) {
      begun += 1;
      tally.add(await answered(client, request, until, () => told(true)));
      told(false);
    }
  };
  const others = Array.from({ length: OTHERS }, () => keepBusy(client, model, prompt, tally.others, until));
  const askers = Array.from({ length: ASKING }, asking);
  try {
    await Promise.race([Promise.all(askers), ...others]); // the others end by errors only
  } finally {
    over.abort();
    await Promise.allSettled([...askers, ...others]);
  }
}

async function answered(client, request, signal, waits) {
  for (;;) {
    try {
      return await ask(client, request, signal);
    } catch (error) {
      if (error.status !== 429) throw error;
      waits();
      await pause(1000 * error.seconds, signal);
    }
  }
}
