// The page: from its fields to requests, and from answers to what is shown.

import { Client, Refused } from "./client.js";
import { Tally, ask, prove } from "./proof.js";

// What the model that comes with detjax continues; on this one the bits of XLA's own operations waver.
const PROMPTS = {
  completion: "KING RICHARD III:\nHell is empty, and all the devils are here.\n",
  chat: "Does it matter in which order a computer adds numbers?",
};
const FEWEST_COLUMNS = 16;
const MOST_COLUMNS = 32;
const MOST_SHOWN = 12; // of unique answers

const $ = (id) => document.getElementById(id);
const client = new Client();
let model = null;

// --- the model -------------------------------------------------------------------------------------------------------

async function meet() {
  tell("model-error", null);
  try {
    model = await client.model();
  } catch (error) {
    $("key-form").hidden = error.status !== 401;
    if (error.status === 401 && !client.key) $("key").focus();
    else tell("model-error", error);
    return;
  }
  $("key-form").hidden = true;
  $("model").textContent = model.id;
  $("fingerprint").textContent = model.system_fingerprint;
  document.title = `${model.id} – detjax`;
  if (model.chat === false) {
    $("as-chat").disabled = true;
    $("as-chat").labels[0].title = "The model has no chat template.";
  }
  $("send").disabled = $("prove-button").disabled = false;
}

// --- requests --------------------------------------------------------------------------------------------------------

/** What the fields say. */
function request() {
  const prompt = $("prompt").value;
  const isChat = $("as-chat").checked;
  const body = {
    model: model.id,
    max_tokens: $("max-tokens").valueAsNumber,
    temperature: $("temperature").valueAsNumber,
    seed: $("seed").valueAsNumber,
    stream_options: { include_batch: true },
  };
  return isChat
    ? { path: "/v1/chat/completions", body: { ...body, messages: [{ role: "user", content: prompt }], logprobs: true } }
    : { path: "/v1/completions", body: { ...body, prompt, logprobs: 0 } };
}

/** A form whose button begins something, and then stops it. */
function startAndStop(form, button, label, work) {
  let stop = null;
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (stop) return stop.abort();
    if (!$("ask").reportValidity()) return;
    stop = new AbortController();
    button.textContent = "Stop";
    button.classList.add("stops");
    const others = [$("send"), $("prove-button")].filter((other) => other !== button);
    others.forEach((other) => (other.disabled = true));
    try {
      await work(stop.signal);
    } finally {
      stop = null;
      button.textContent = label;
      button.classList.remove("stops");
      others.forEach((other) => (other.disabled = false));
    }
  });
  window.addEventListener("pagehide", () => stop?.abort());
}

function tell(id, error) {
  $(id).textContent = error === null ? "" : inWords(error);
}

function inWords(error) {
  if (!(error instanceof Refused)) throw error;
  const { message } = error;
  const sentence = message[0].toUpperCase() + message.slice(1);
  return /[.!?]$/.test(sentence) ? sentence : `${sentence}.`;
}

// --- one answer ------------------------------------------------------------------------------------------------------

async function send(signal) {
  const [box, output] = [$("answer"), $("output")];
  const begun = performance.now();
  const seconds = () => `${((performance.now() - begun) / 1000).toFixed(1)} s`;
  tell("ask-error", null);
  output.textContent = "";
  $("output-facts").textContent = "";
  output.setAttribute("aria-busy", "true");
  const show = atFrames((answer) => {
    const isAtEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 8;
    output.textContent = answer.text;
    if (isAtEnd) box.scrollTop = box.scrollHeight;
    $("output-facts").textContent = `${counted(answer.tokens.length, "token")}, ${seconds()}`;
  });
  let answer = null;
  try {
    await ask(client, request(), signal, (one) => show((answer = one)));
    show.now();
    const ending = answer.ending === "length" ? "cut at max tokens" : "ended by itself";
    $("output-facts").textContent = `${counted(answer.tokens.length, "token")}, ${ending}, ${seconds()}. SHA-256 `;
    $("output-facts").append(code(answer.digest));
  } catch (error) {
    show.now();
    if (!signal.aborted) return tell("ask-error", error);
    $("output-facts").textContent = `Stopped after ${counted(answer?.tokens.length ?? 0, "token")}.`;
  } finally {
    output.setAttribute("aria-busy", "false");
  }
}

// --- many answers ----------------------------------------------------------------------------------------------------

async function proof(signal) {
  const total = $("total").valueAsNumber;
  const tally = new Tally();
  const show = atFrames(() => showTally(tally, total));
  tell("prove-error", null);
  $("unique-answers").replaceChildren();
  showTally(tally, total);
  const waits = (isWaiting) => {
    say(isWaiting ? "The server has no room at the moment. Waiting for it." : "Asking.");
    show();
  };
  waits(false);
  let ending = "";
  try {
    await prove(client, model, request(), $("prompt").value, total, tally, signal, waits);
  } catch (error) {
    ending = "Stopped. ";
    if (!signal.aborted) tell("prove-error", error);
  }
  show.now();
  say(ending + verdict(tally));
}

function say(text) {
  if ($("verdict").textContent !== text) $("verdict").textContent = text;
}

function verdict(tally) {
  const { answers, unique, fingerprints } = tally;
  if (answers === 0) return "There is no answer to count.";
  if (answers === 1) return "One answer, which there is nothing to compare with.";
  const others =
    tally.largestBatch === 1
      ? "No other sample was ever computed with it, so this says little."
      : `They were computed in steps of ${range(tally)} samples.`;
  if (unique.size === 1) {
    return `${answers} answers, and all are the same: text, tokens, and every bit of the logprobs. ${others}`;
  }
  const texts = tally.texts === 1 ? "all with the same text" : `with ${tally.texts} different texts`;
  const changed = fingerprints.size > 1 ? " The server's fingerprint changed meanwhile." : "";
  return `${answers} answers, ${unique.size} different ones, ${texts}. ${others}${changed}`;
}

function showTally(tally, total) {
  $("progress").max = total;
  $("progress").value = tally.answers;
  $("answers-label").textContent = `Answers of ${total}`;
  $("answers").textContent = tally.answers;
  $("unique").textContent = tally.answers ? tally.unique.size : "–";
  $("proof").classList.toggle("differs", tally.unique.size > 1);
  $("batches").textContent = tally.batches.size ? range(tally) : "–";
  showHistogram(tally);
  const { requests, samples, abandoned, refused } = tally.others;
  const sent = `${counted(requests, "request")} of ${counted(samples, "sample")} in all`;
  const ends = `${abandoned} given up midway${refused ? `, ${refused} refused by the server` : ""}`;
  $("others").textContent = `Others meanwhile: ${sent}; ${ends}.`;
  showUnique(tally);
}

function range({ smallestBatch, largestBatch }) {
  return smallestBatch === largestBatch ? `${largestBatch}` : `${smallestBatch}–${largestBatch}`;
}

function showHistogram(tally) {
  const largest = Math.max(FEWEST_COLUMNS, ...tally.batches.keys());
  let width = 1;
  while (largest / width > MOST_COLUMNS) width *= 2;
  const heights = Array(Math.ceil(largest / width)).fill(0);
  for (const [size, tokens] of tally.batches) heights[Math.ceil(size / width) - 1] += tokens;
  const highest = Math.max(1, ...heights);
  const histogram = $("histogram");
  while (histogram.children.length > heights.length) histogram.lastChild.remove();
  while (histogram.children.length < heights.length) histogram.append(document.createElement("span"));
  heights.forEach((tokens, i) => {
    const sizes = width === 1 ? `${i + 1}` : `${i * width + 1}–${(i + 1) * width}`;
    histogram.children[i].style.height = `${(100 * tokens) / highest}%`;
    histogram.children[i].title = `${sizes}: ${counted(tokens, "token")}`;
  });
  $("axis-end").textContent = heights.length * width;
  const sizes = [...tally.batches].sort(([a], [b]) => a - b).map(([size, tokens]) => `${size}: ${tokens}`);
  histogram.setAttribute("aria-label", `Tokens by batch size. ${sizes.join(", ") || "None yet"}`);
}

function showUnique(tally) {
  const list = $("unique-answers");
  const [first] = tally.unique.values();
  [...tally.unique.values()].slice(0, MOST_SHOWN).forEach((one, i) => {
    const item = list.children[i] ?? list.appendChild(uniqueItem(one, first));
    item.firstChild.textContent = `${counted(one.count, "answer")} with SHA-256 `;
    item.firstChild.append(code(one.digest));
  });
  const more = tally.unique.size - MOST_SHOWN;
  if (more <= 0) return;
  const rest = list.children[MOST_SHOWN] ?? list.appendChild(document.createElement("li"));
  rest.textContent = `And ${more} more.`;
}

function uniqueItem({ answer }, { answer: first }) {
  const item = document.createElement("li");
  item.append(paragraph());
  if (answer !== first) item.append(paragraph(...difference(answer, first)));
  if (answer === first || answer.text !== first.text) item.append(textSince(answer, divergence(answer, first)));
  return item;
}

/** In words, where and how an answer first differs from the first one. */
function difference(answer, first) {
  const at = answer.differsFrom(first);
  if (at < 0) return ["The same tokens and logprobs as the first one, with another ending."];
  const [own, its] = [answer.tokens[at], first.tokens[at]];
  const where = `Differs from the first one at token ${at + 1}`;
  if (!own || !its) return [`${where}, where one of them has ended.`];
  if (own.token !== its.token) return [`${where}: `, quoted(own), " in place of ", quoted(its), "."];
  const texts = answer.text === first.text ? "The text is the same." : "The text differs behind it.";
  return [`${where}, `, quoted(own), `: logprob ${own.logprob} in place of ${its.logprob}. ${texts}`];
}

/** The index in the text of the first token that another answer does not have. */
function divergence({ text, tokens }, other) {
  if (text === other.text) return text.length;
  let [same, before] = [0, 0];
  while (same < text.length && text[same] === other.text[same]) same += 1;
  for (let i = 0; i < tokens.length && tokens[i].token === other.tokens[i]?.token; i++) before += tokens[i].token.length;
  return Math.min(same, before); // tokens of half a character are longer than what they add to the text
}

/** An answer's text, marked from there on. */
function textSince(answer, start) {
  const element = document.createElement("div");
  element.className = "text";
  element.tabIndex = 0;
  const marked = document.createElement("mark");
  marked.textContent = answer.text.slice(start);
  element.append(answer.text.slice(0, start), marked);
  return element;
}

// --- words and elements ----------------------------------------------------------------------------------------------

const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

function code(text) {
  const element = document.createElement("span");
  element.className = "code";
  element.textContent = text;
  return element;
}

function quoted({ token }) {
  const element = code(JSON.stringify(token));
  element.classList.add("token");
  return element;
}

function paragraph(...content) {
  const element = document.createElement("p");
  element.append(...content);
  return element;
}

/** Draws with the latest argument once per frame; `now` draws what is still to be drawn. */
function atFrames(draw) {
  let frame = null;
  let latest = [];
  const drawn = () => {
    frame = null;
    draw(...latest);
  };
  const later = (...args) => {
    latest = args;
    frame ??= requestAnimationFrame(drawn);
  };
  later.now = () => {
    if (frame === null) return;
    cancelAnimationFrame(frame);
    drawn();
  };
  return later;
}

// --- what begins it --------------------------------------------------------------------------------------------------

$("prompt").value = PROMPTS.completion;
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || $("send").disabled) return;
  event.preventDefault();
  $("ask").requestSubmit();
});
$("ask").addEventListener("change", ({ target }) => {
  const isUntouched = Object.values(PROMPTS).includes($("prompt").value);
  if (target.name === "kind" && isUntouched) $("prompt").value = PROMPTS[target.value];
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  client.key = $("key").value;
  meet();
});
startAndStop($("ask"), $("send"), "Send", send);
startAndStop($("prove"), $("prove-button"), "Prove it", proof);
meet();
