/** Reads the data in the page and builds its sections, each only if there is something to show. */

import { benchSection } from "./bench";
import { deviceSection } from "./device";
import { drawWhatIsSeen } from "./dom";
import { environmentSection } from "./environment";
import { findingsSection } from "./findings";
import { flameSection } from "./flame_section";
import { historySection } from "./history";
import { memorySection } from "./memory";
import { navigation, themeSwitch } from "./navigation";
import { numericsSection } from "./numerics";
import type { Page } from "./page_data";
import { listenToPrinting, onPaper } from "./paper";
import { sectionOf, type Section } from "./plot";
import { rooflineSection } from "./roofline";
import { samplesSection } from "./samples";
import { timelineSection } from "./timeline";
import { fillVerdict } from "./verdict";
import { weldedSection } from "./welded";

function read(): Page {
  const text = document.getElementById("torchweld-report")?.textContent ?? "";
  return JSON.parse(text) as Page;
}

function build(page: Page): void {
  const main = document.getElementById("main");
  const verdict = document.getElementById("verdict");
  if (main === null || verdict === null) return;
  const makers: ((page: Page) => Section | null)[] = [
    findingsSection,
    weldedSection,
    flameSection,
    timelineSection,
    deviceSection,
    rooflineSection,
    memorySection,
    benchSection,
    historySection,
    numericsSection,
    samplesSection,
    environmentSection,
  ];
  const sections: Section[] = [];
  for (const make of makers) {
    const section = make(page);
    if (section === null) continue;
    sections.push(section);
    main.append(sectionOf(section));
  }
  const top = document.getElementById("top");
  top?.append(themeSwitch());
  const links = sections.map((one): [string, string] => [one.id, one.short]);
  top?.after(navigation([["verdict", "Verdict"], ...links]));
  fillVerdict(verdict, page);
}

listenToPrinting();
build(read());
// Last, when everything is made.
onPaper(drawWhatIsSeen, () => undefined);
