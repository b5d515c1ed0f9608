// The page: its two tabs, the key, and what is asked when.

const STATUS_EVERY = 1000;
const TRACES_EVERY = 5000;

function choose(name) {
  for (const tab of ["chat", "watch"]) {
    const chosen = tab === name;
    $(tab).hidden = !chosen;
    $(`tab-${tab}`).setAttribute("aria-selected", String(chosen));
    $(`tab-${tab}`).tabIndex = chosen ? 0 : -1;
  }
  if (name === "watch") {
    lookAtTraces();
    // A server that does not answer is told by the next regular look.
    lookAtStatus().catch(() => {});
  } else $("log").scrollTop = $("log").scrollHeight;
  if (location.hash !== `#${name}`) history.replaceState(null, "", `#${name}`);
}

/** Asks again and again while the page is seen; a server that is gone is told in the header. */
function repeat(look, every) {
  const step = async () => {
    if (!document.hidden) {
      try {
        await look();
      } catch (error) {
        $("server").textContent = error instanceof ServerError ? error.message : "the server does not answer";
        $("server").classList.add("bad");
      }
    }
    setTimeout(step, every);
  };
  step();
}

function start() {
  for (const [name, other] of [["chat", "watch"], ["watch", "chat"]]) {
    $(`tab-${name}`).addEventListener("click", () => choose(name));
    $(`tab-${name}`).addEventListener("keydown", (event) => {
      if (["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) {
        event.preventDefault();
        choose(other);
        $(`tab-${other}`).focus();
      }
    });
  }
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    kept.set("key", $("key").value.trim());
    $("key").value = "";
    $("key-form").hidden = true;
    loadModels().catch(() => {});
  });
  startChat();
  startWatch();
  choose(location.hash === "#watch" ? "watch" : "chat");
  let models = false;
  repeat(async () => {
    await lookAtStatus();
    if (!models) {
      await loadModels();
      models = true;
    }
  }, STATUS_EVERY);
  repeat(async () => {
    if (!$("watch").hidden) await lookAtTraces();
  }, TRACES_EVERY);
}

start();
