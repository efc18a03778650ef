"""Questions a trained model: on the command line, at a prompt, or on a page.

  realm ask RUN "who painted the Mona Lisa"   one question, or several
  realm ask RUN < questions.txt               one a line; a prompt, at a terminal
  realm ask RUN --port=8000                   a page, and JSON: POST /answer
                                              {"question": ...}, GET /status

RUN is the folder of a chain, such as runs/quickstart, or of a model that `realm
finetune` has trained. Sizes, lengths and corpus are those that the run recorded.
The corpus may have moved with RUN (RUN/corpus), or be given by --corpus.

A sentence takes the place of a question: "The Berlin Wall fell in [MASK]." is filled in
by the pre-trained model, [MASK] being a wordpiece, and "[MASK=1989]" gives the
probability of words. Documents and their probabilities show what reading does.

It prints the answer, in whole words of the text, with the documents it was found in and
their probabilities. With --hybrid documents are found by their words as well, with
BM25, which first counts those of the whole corpus. It answers from the newest version
of the corpus; a version that `realm update-corpus` makes meanwhile is used from the
next question on. Ctrl-C ends it.

Gin files may stand in place of RUN, with the settings below and no options but --json
and --import_module.

Example:
  realm ask --gin_file=gin/models/base.gin --gin_file=gin/runs/ask.gin \\
    --gin.CORPUS=runs/my/corpus --gin.FINETUNED=runs/my/finetune \\
    --gin.QUESTION="who painted the Mona Lisa"
"""

import argparse
import json
import threading
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from realm_jax.answering.answers import Document
from realm_jax.cli import bert_settings, configuration, recorded_run
from realm_jax.cli.standard_input import Notes, each_line, is_terminal
from realm_jax.errors import BadInputError
from realm_jax.evaluation import ask, recorded
from realm_jax.extras import require_extra
from realm_jax.metrics.curves import made_at

_note = Notes("ask")


def main(argv: Sequence[str], stop: threading.Event) -> int:
    """Runs the command, which ordinarily ends by being stopped."""
    flags = recorded_run.parse(_make_parser(), argv)
    if flags.run:
        config, questions = _recorded(flags), flags.questions
    else:
        config = bert_settings.follow_weights(configuration.configured(ask.AskConfig))
        bert_settings.require_decided_remat()
        questions = [config.question] if config.question else []
    show = _print_json if flags.json else _Screen(echo=len(questions) != 1)
    if config.port:
        _serve(config, stop)
    elif questions:
        asked = [ask.require_question(question) for question in questions]
        service = ask.AnswerService(config, stop, _note)
        for question in asked:
            if not stop.is_set():
                show(service.answer(question))
    else:
        _converse(config, stop, show, prompts=not flags.json)
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = recorded_run.make_parser("realm ask", __doc__)
    parser.add_argument("questions", nargs="*", default=[], metavar="QUESTION")
    parser.add_argument(
        "--json", action="store_true", help="print an object a line for each answer"
    )
    parser.add_argument(
        "--hybrid", action="store_true", help="search by words as well, with BM25"
    )
    parser.add_argument(
        "--port", type=recorded_run.whole_number, default=0, help="serve a page there"
    )
    parser.add_argument(
        "--host",
        default=ask.AskConfig.host,
        help="its address; 0.0.0.0 for others, without a password",
    )
    parser.add_argument(
        "--allow_host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name that browsers know the page by, beside localhost and its address",
    )
    return parser


def _recorded(flags: argparse.Namespace) -> ask.AskConfig:
    if flags.port and flags.questions:
        raise BadInputError(
            f"expected questions or a port, got both ({flags.questions[0]!r}, "
            f"{flags.port}); leave one out"
        )
    if not flags.port and (flags.allow_host or flags.host != ask.AskConfig.host):
        raise BadInputError(
            "expected --port beside --host and --allow_host, which are of the page, "
            "got none; add --port=8000, or leave them out"
        )
    return recorded.ask_config(
        flags.run,
        recorded_run.given(flags),
        hybrid=flags.hybrid,
        port=flags.port,
        host=flags.host,
        allowed_hosts=flags.allow_host,
    )


def _serve(config: ask.AskConfig, stop: threading.Event) -> None:
    require_extra("serve", "a page on PORT")
    # aiohttp takes half a second to import, and only a page needs it.
    from realm_jax.evaluation import server

    # Opened first, so that a port in use is reported before the model is loaded.
    listener = server.open_port(config.host, config.port)
    with listener, ask.AnswerService(config, stop, _note) as respondent:
        where = f"http://{config.host}:{config.port}"
        server.serve(
            respondent,
            listener,
            stop,
            on_ready=lambda: _note(f"ready at {where}; Ctrl-C ends it"),
            hosts=(config.host, *config.allowed_hosts),
        )


def _converse(
    config: ask.AskConfig,
    stop: threading.Event,
    show: Callable[[ask.Reply], None],
    *,
    prompts: bool,
) -> None:
    if prompts and is_terminal():
        # The question stands there already.
        show = _Screen(echo=False)
    with ask.AnswerService(config, stop, _note) as respondent:
        each_line(
            lambda question: show(respondent.answer(question)),
            stop,
            _note,
            prompts=prompts,
        )


def _print_json(reply: ask.Reply) -> None:
    """Prints a reply as one line of JSON, as POST /answer gives it."""
    print(json.dumps(reply.describe(), ensure_ascii=False), flush=True)


class _Screen:
    """Prints an answer, the documents it was found in, and the versions used."""

    def __init__(self, *, echo: bool):
        """`echo`: whether the question is printed, too."""
        self._echo = echo
        self._console = Console()

    def __call__(self, reply: ask.Reply) -> None:
        console, answer = self._console, reply.answer
        if self._echo:
            console.print(Text(f"? {reply.question}", style="bold cyan"))
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
            passage = Text(document.text)
            for start, end in document.places:
                passage.stylize("bold green" if answer.text else "", start, end)
            block = block_text(document, passage)
            sources.add_row(*(f"{n:.3f}" for n in numbers), block)
        console.print(sources)
        version = reply.version.describe()
        console.print(
            Text(
                f"p(y|x) {answer.probability:.3f}; index "
                f"made {made_at(version['index_step'])}, corpus "
                f"{version['fingerprint'][:12]}",
                style="dim",
            )
        )
        if self._echo:
            console.print()


def block_text(document: Document, passage: Text) -> Text:
    """Returns the title and the source of a block, above its passage."""
    source = f" ({document.source_id})" if document.source_id else ""
    above = "\n" if passage else ""
    return Text.assemble((document.title, "bold"), (source, "dim"), above, passage)
