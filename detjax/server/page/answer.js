// Collects an answer from its chunks, and compares answers.

import { sha256 } from "./sha256.js";

export class Answer {
  text = "";
  tokens = []; // { token, logprob, bytes }; completions have no bytes
  batches = []; // for each token, the number of samples in the step that computed it
  ending = null;
  fingerprint = null;

  add(chunk) {
    this.fingerprint = chunk.system_fingerprint;
    for (const { text, delta, logprobs, finish_reason } of chunk.choices) {
      this.text += text ?? delta?.content ?? "";
      const tokens = tokensOf(logprobs);
      this.tokens.push(...tokens);
      if (chunk.batch !== undefined) this.batches.push(...tokens.map(() => chunk.batch));
      this.ending = finish_reason ?? this.ending;
    }
  }

  /** A digest of text, tokens, logprobs and ending, equal for two answers if all their bits are equal. */
  get digest() {
    const content = [this.text, this.tokens.map(({ token, logprob, bytes }) => [token, logprob, bytes]), this.ending];
    // JSON writes enough digits to identify a double, but drops the sign of zero.
    return sha256(JSON.stringify(content, (_, value) => (Object.is(value, -0) ? "-0" : value)));
  }

  /** The index of the first token that differs from another answer's, or -1. */
  firstDifference(other) {
    const length = Math.max(this.tokens.length, other.tokens.length);
    for (let i = 0; i < length; i++) if (!isSame(this.tokens[i], other.tokens[i])) return i;
    return -1;
  }
}

function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) return logprobs.content.map(({ token, logprob, bytes }) => ({ token, logprob, bytes }));
  return logprobs.tokens.map((token, i) => ({ token, logprob: logprobs.token_logprobs[i], bytes: null }));
}

function isSame(one, other) {
  if (!one || !other) return false;
  return Object.is(one.logprob, other.logprob) && one.token === other.token && `${one.bytes}` === `${other.bytes}`;
}
