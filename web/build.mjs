// Bundles the page's script and style into the package's assets, with the licences of what is inside.
//
// `node build.mjs [folder]`. The same sources and packages give the same bytes.

import { build } from "esbuild";
import { existsSync, mkdirSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const target = process.argv[2] ?? join(here, "../src/torchweld/pages/assets");

async function bundle(entry, out) {
  const made = await build({
    absWorkingDir: here,
    entryPoints: [entry],
    outfile: join(target, out),
    bundle: true,
    minify: true,
    charset: "utf8",
    format: "iife",
    legalComments: "none", // licences.txt has them in full
    target: ["chrome123", "firefox121", "safari17.5"],
    metafile: true,
    write: false,
    logLevel: "warning",
  });
  // In a page the text stands between tags: a newline less is nothing to get wrong.
  writeFileSync(join(target, out), made.outputFiles[0].text.trimEnd());
  return Object.keys(made.metafile.inputs);
}

function licenceOf(folder) {
  const name = readdirSync(folder).find((one) => /^licen[cs]e/i.test(one));
  if (name === undefined) throw new Error(`${folder} has no licence file`);
  return readFileSync(join(folder, name), "utf8").replaceAll("\r\n", "\n").trim();
}

function licences(inputs) {
  const folders = new Set();
  for (const input of inputs) {
    const found = /^(node_modules\/(?:@[^/]+\/)?[^/]+)\//.exec(input);
    if (found !== null && existsSync(join(here, found[1], "package.json"))) folders.add(found[1]);
  }
  const texts = [...folders].sort().map((folder) => {
    const about = JSON.parse(readFileSync(join(here, folder, "package.json"), "utf8"));
    const head = `${about.name} ${about.version} (${about.license})`;
    return `${head}\n${"=".repeat(head.length)}\n\n${licenceOf(join(here, folder))}\n`;
  });
  return (
    "The script of this page contains parts of these packages. Everything else in it belongs to\n" +
    "torchweld, under the Apache License 2.0.\n\n" +
    texts.join("\n\n")
  );
}

mkdirSync(target, { recursive: true });
const inputs = await bundle("src/main.ts", "page.js");
await bundle("style/page.css", "page.css");
writeFileSync(join(target, "licences.txt"), licences(inputs));
