// One answer, gathered from its chunks, and what makes two of them the same.

import { sha256 } from "./sha256.js";

export class Answer {
  text = "";
  tokens = []; // { token, logprob, bytes }; completions do not tell bytes
  batches = []; // of each token, how many samples the step had that computed it
  ending = null;
  fingerprint = null;

  add(chunk) {
    this.fingerprint = chunk.system_fingerprint;
    for (const { text, delta, logprobs, finish_reason } of chunk.choices) {
      this.text += text ?? delta?.content ?? "";
      const tokens = scored(logprobs);
      this.tokens.push(...tokens);
      if (chunk.batch !== undefined) this.batches.push(...tokens.map(() => chunk.batch));
      this.ending = finish_reason ?? this.ending;
    }
  }

  /** Of everything that is said: two answers have the same one if no bit of them differs. */
  get digest() {
    const said = [this.text, this.tokens.map(({ token, logprob, bytes }) => [token, logprob, bytes]), this.ending];
    // A double is written with as many digits as tell it from all others; zero's sign would be left out.
    return sha256(JSON.stringify(said, (_, value) => (Object.is(value, -0) ? "-0" : value)));
  }

  /** The index of the first token in which another answer differs; -1 if none does. */
  differsFrom(other) {
    const most = Math.max(this.tokens.length, other.tokens.length);
    for (let i = 0; i < most; i++) if (!isSame(this.tokens[i], other.tokens[i])) return i;
    return -1;
  }
}

function scored(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) return logprobs.content.map(({ token, logprob, bytes }) => ({ token, logprob, bytes }));
  return logprobs.tokens.map((token, i) => ({ token, logprob: logprobs.token_logprobs[i], bytes: null }));
}

function isSame(one, other) {
  if (!one || !other) return false;
  return Object.is(one.logprob, other.logprob) && one.token === other.token && `${one.bytes}` === `${other.bytes}`;
}
