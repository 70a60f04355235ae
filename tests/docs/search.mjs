// The site's search, run as the browser runs it: the theme's own worker, with the site's own index.
// Arguments: the worker, the index, then queries; prints for each query the pages found, best first, as JSON.
import { readFileSync } from "node:fs";
import { runInThisContext } from "node:vm";

const [worker, index, ...queries] = process.argv.slice(2);
let listener;
let answer;
globalThis.self = globalThis;
globalThis.addEventListener = (_, heard) => (listener = heard);
globalThis.postMessage = (message) => answer(message);
runInThisContext(readFileSync(worker, "utf8"));

const ask = (type, data) =>
  new Promise((resolve) => {
    answer = resolve;
    listener({ data: { type, data } });
  });

const { config, docs } = JSON.parse(readFileSync(index, "utf8"));
await ask(0, { config, docs, options: { suggest: true } });
const found = {};
for (const query of queries) {
  const { data } = await ask(2, query);
  found[query] = data.items.map((sections) => sections[0].location.split("#")[0]);
}
console.log(JSON.stringify(found));
