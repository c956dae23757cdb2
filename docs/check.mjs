// Opens every page of build/site in a browser, on a desktop and a phone, in light and dark colours, and lists what is
// wrong: links and anchors that lead nowhere, requests that fail or leave the site, pages wider than the screen, and
// what axe-core calls serious or critical. `make docs-check` installs what this needs; CHROMIUM names the browser.
//
//     node docs/check.mjs [part of a page's name]

import { existsSync, readdirSync, readFileSync } from "node:fs";
import { createServer } from "node:http";
import { createRequire } from "node:module";
import { extname, join, resolve } from "node:path";

const SITE = resolve("build/site");
const require = createRequire(resolve("build/check/package.json"));
const puppeteer = require("puppeteer-core");
const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
const TYPES = { ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml" };
const SCREENS = { desktop: { width: 1280, height: 900 }, phone: { width: 390, height: 844, isMobile: true, hasTouch: true } };
const pages = readdirSync(SITE, { recursive: true }).filter((name) => name.endsWith(".html") && name.includes(process.argv[2] ?? ""));

const server = createServer((request, response) => {
  const path = decodeURIComponent(new URL(request.url, "http://site").pathname);
  try {
    const content = readFileSync(join(SITE, path));
    response.writeHead(200, { "content-type": TYPES[extname(path)] ?? "application/octet-stream" }).end(content);
  } catch {
    response.writeHead(404).end();
  }
});
await new Promise((done) => server.listen(0, "127.0.0.1", done));
const base = `http://127.0.0.1:${server.address().port}/`;

const wrong = new Map(); // what is wrong, and where
const tell = (what, where) => wrong.set(what, [...(wrong.get(what) ?? []), where]);
const browser = await puppeteer.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: ["--no-sandbox"] });
const ids = new Map();
const links = [];

for (const [screen, viewport] of Object.entries(SCREENS)) {
  for (const scheme of ["light", "dark"]) {
    const context = await browser.createBrowserContext();
    const page = await context.newPage();
    await page.setViewport(viewport);
    await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
    page.on("request", (sent) => sent.url().startsWith(base) || sent.url().startsWith("data:") || tell(`asks for ${sent.url()}`, page.url()));
    page.on("response", (got) => got.status() >= 400 && tell(`${got.status()} for ${got.url()}`, page.url()));
    for (const name of pages) {
      await page.goto(base + name, { waitUntil: "load", timeout: 120_000 });
      await look(page, name, `${name} (${screen}, ${scheme})`);
    }
    await context.close();
  }
}
for (const [href, name] of links) {
  const [target, anchor] = href.slice(base.length).split("#");
  if (!existsSync(join(SITE, target))) tell(`no page ${target}`, name);
  else if (anchor && ids.has(target) && !ids.get(target).has(decodeURIComponent(anchor))) tell(`no anchor ${target}#${anchor}`, name);
}
await browser.close();
server.close();
for (const [what, places] of wrong) console.log(`${what}\n    ${places.slice(0, 5).join("\n    ")}${places.length > 5 ? `\n    and ${places.length - 5} more` : ""}`);
console.log(`${pages.length} pages, ${links.length} links, ${wrong.size} kinds of faults`);
process.exitCode = wrong.size ? 1 : 0;

async function look(page, name, place) {
  if (!ids.has(name)) {
    ids.set(name, new Set(await page.$$eval("[id]", (all) => all.map((each) => each.id))));
    const found = await page.$$eval("a[href]", (all) => all.map((each) => each.href));
    links.push(...found.filter((href) => href.startsWith(base)).map((href) => [href, name]));
  }
  const over = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  if (over > 0) tell("the page is wider than the screen", `${place}: ${over} px`);
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => globalThis.axe.run({ resultTypes: ["violations"] }));
  for (const { id, impact, nodes } of violations.filter((each) => ["serious", "critical"].includes(each.impact)))
    tell(`${impact}: ${id}`, `${place}: ${nodes.length} times, ${nodes[0].target} ${nodes[0].html.slice(0, 120)}`);
}
