// Mathematics that arithmatex left as TeX, typeset by the KaTeX beside this file.
document.addEventListener("DOMContentLoaded", () => {
  for (const element of document.querySelectorAll(".arithmatex")) {
    const tex = element.textContent.trim();
    katex.render(tex.slice(2, -2), element, { displayMode: tex.startsWith("\\["), throwOnError: true });
  }
  document.documentElement.dataset.typeset = document.querySelectorAll(".katex").length;
});
