// Reads {formulas: [{tex, display}], drawings: [text]} and prints the formulas as HTML, after a look at the drawings.
const fs = require("fs");
const path = require("path");

const modules = path.resolve(__dirname, "../../.site/node_modules");
const katex = require(path.join(modules, "katex"));
const { formulas, drawings } = JSON.parse(fs.readFileSync(0, "utf8"));

// Mermaid cleans labels with a browser's document, which is not needed to tell whether a text can be read.
Function.prototype.addHook = () => {};
Function.prototype.sanitize = (text) => text;

async function main() {
  if (drawings.length) {
    const file = path.join(modules, "@mermaid-js/tiny/dist/mermaid.tiny.js");
    require("vm").runInThisContext(fs.readFileSync(file, "utf8"));
    for (const text of drawings) await globalThis.mermaid.parse(text);
  }
  const html = formulas.map(({ tex, display }) => katex.renderToString(tex, { displayMode: display, strict: "ignore" }));
  process.stdout.write(JSON.stringify(html));
}

main().catch((error) => {
  process.stderr.write(`${error.message}\n`);
  process.exit(1);
});
