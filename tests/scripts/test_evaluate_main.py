"""scripts/evaluate.py itself: what it makes of the end of a subcommand."""

from types import SimpleNamespace

from scripts import evaluate


def test_an_interrupt_has_a_status_of_its_own(monkeypatch, capsys):
    def stop(_):
        raise KeyboardInterrupt

    command = SimpleNamespace(HELP="stops", add_arguments=lambda _: None, run=stop)
    monkeypatch.setattr(evaluate, "subcommands", lambda: {"stop": command})
    assert evaluate.main(["stop"]) == 130
    assert capsys.readouterr().err.strip() == "interrupted"
