// Before anything is drawn: the theme that was chosen here. Without one the system's is used.
"use strict";
try {
  const theme = localStorage.getItem("tinygrad-nv:theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch { /* storage is off: the system's theme */ }
