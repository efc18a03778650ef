"""Questions a trained model: on the command line, at a prompt, or on a page.

Prints the answer with the documents it was found in, and their probabilities. With PORT
it serves a page, and JSON: POST /answer {"question": ...}, GET /status. Without PORT
and QUESTION it reads questions from the terminal or standard input, one per line. It
answers from the newest version of CORPUS; a version that `realm update-corpus` makes
meanwhile is used from the next question on. Ctrl-C ends it.

Macros:
  CORPUS       prepared corpus that the model was fine-tuned on
  FINETUNED    model directory of `realm finetune`
  QUESTION     a single question; the command ends after answering it
  PORT, HOST   where to serve a page, e.g. 8000
  PRETRAINED   the model directory that FINETUNED started from; it embeds later versions
               of CORPUS for a model with one tower
  CHECKPOINT   the checkpoint of PRETRAINED that was fine-tuned: "last" or "best"
  SEARCHER     "device" (exact) or "scann"
  ALLOW_CORPUS_MISMATCH   True: CORPUS may differ from the one that was trained on

Example:
  realm ask --gin_file=gin/models/base.gin --gin_file=gin/runs/ask.gin \\
    --gin.CORPUS='"runs/my/corpus"' --gin.FINETUNED='"runs/my/finetune"' \\
    --gin.QUESTION='"who painted the Mona Lisa"'
"""

import os
import select
import sys
import threading
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from realm_jax.cli import configuration, rematerialization
from realm_jax.errors import BadInputError
from realm_jax.evaluation import ask
from realm_jax.evaluation.answering import Answer, ReadDocument
from realm_jax.extras import require_extra

_STDIN = 0
_LOOK_SECONDS = 0.2
_READ_BYTES = 1 << 16


def main(argv: Sequence[str], stop: threading.Event) -> int:
    """Runs the command, which ordinarily ends by being stopped."""
    parser = configuration.make_parser("realm ask", __doc__)
    configuration.parse(parser, argv, "ask")
    config = configuration.configured(ask.AskConfig)
    rematerialization.require_decided()
    console = Console()
    if config.port:
        _serve(config, stop, console)
    elif config.question:
        question = ask.require_question(config.question)
        _show(ask.AnswerService(config, stop, _Notes()).answer(question), console)
    else:
        _converse(config, stop, console)
    return 0


class _Notes:
    """Prints messages to standard error; only answers go to standard output."""

    def __init__(self):
        self._console = Console(stderr=True)

    def __call__(self, text: str) -> None:
        self._console.print(
            f"ask: {text}", highlight=False, markup=False, soft_wrap=True
        )


def _serve(config: ask.AskConfig, stop: threading.Event, console: Console) -> None:
    require_extra("serve", "a page on PORT")
    # aiohttp takes half a second to import, and only a page needs it.
    from realm_jax.evaluation import server

    note = _Notes()
    # Opened first, so that a port in use is reported before the model is loaded.
    listener = server.open_port(config.host, config.port)
    with listener, ask.AnswerService(config, stop, note) as respondent:
        where = f"http://{config.host}:{config.port}"
        server.serve(
            respondent,
            listener,
            stop,
            on_ready=lambda: note(f"ready at {where}; Ctrl-C ends it"),
        )


def _converse(config: ask.AskConfig, stop: threading.Event, console: Console) -> None:
    note = _Notes()
    with ask.AnswerService(config, stop, note) as respondent:
        terminal = os.isatty(_STDIN)
        if terminal:
            note("ready; Ctrl-D or Ctrl-C ends it")
        for question in _lines(stop, console if terminal else None):
            if not question.strip():
                continue
            try:
                _show(respondent.answer(question), console)
            except BadInputError as error:
                note(str(error))


def _lines(stop: threading.Event, prompt: Console | None) -> Iterator[str]:
    """Yields lines of standard input, until it ends or the process is to stop."""
    buffer = b""
    _prompt(prompt)
    while not stop.is_set():
        # Waits in short intervals, because a signal only sets the event.
        if not select.select([_STDIN], [], [], _LOOK_SECONDS)[0]:
            continue
        data = os.read(_STDIN, _READ_BYTES)
        *lines, buffer = (buffer + data).split(b"\n")
        if not data:
            lines = [buffer]
        for line in lines:
            if stop.is_set():
                return
            yield line.decode(errors="replace")
        if not data:
            return
        _prompt(prompt)


def _prompt(console: Console | None) -> None:
    if console is not None:
        console.print("\n[bold cyan]?[/] ", end="")


def _show(reply: ask.Reply, console: Console) -> None:
    """Prints an answer, the documents it was found in, and the versions used."""
    answer = reply.answer
    if reply.note:
        console.print(Text(reply.note, style="yellow"))
    console.print(Text(answer.text or "(no answer)", style="bold green"))
    sources = Table(box=None, pad_edge=False, expand=True)
    for name in ("p(z|x)", "p(y|z,x)", "product"):
        sources.add_column(name, justify="right", no_wrap=True)
    sources.add_column("source", ratio=1)
    for document in answer.documents:
        chances = document.probability, document.answer_probability
        numbers = (*chances, chances[0] * chances[1])
        sources.add_row(*(f"{n:.3f}" for n in numbers), _source(document, answer))
    console.print(sources)
    version = reply.version.describe()
    console.print(
        Text(
            f"p(y|x) {answer.marginal:.3f}; index of step {version['index_step']}, "
            f"corpus {version['fingerprint'][:12]}",
            style="dim",
        )
    )


def _source(document: ReadDocument, answer: Answer) -> Text:
    """Returns title, source and passage, with the answer marked."""
    text = Text()
    text.append(document.title, "bold")
    text.append(f" ({document.source_id})\n", "dim")
    passage = Text(document.body)
    for start, end in document.places:
        passage.stylize("bold green" if answer.text else "", start, end)
    text.append_text(passage)
    return text


if __name__ == "__main__":
    from realm_jax.cli.main import console

    console(["ask", *sys.argv[1:]])
