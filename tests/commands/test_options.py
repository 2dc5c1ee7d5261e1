"""The commands of `tutti` and their options: a change to this list is a change that users see."""

import typer

from tutti.cli import app

OPTIONS = {
    "run": (
        "--chaos --checkpoint-every --grace --hosts --lab --listen --on --restarts --spawn --start --strategy "
        "--timeout --workers ARGS SCRIPT"
    ),
    "join": "--grace --restarts --spawn --workers ADDRESS ARGS SCRIPT",
    "submit kubernetes": (
        "--checkpoint-every --claim --dockerfile --gpus-per-node --image --kind --name --namespace --nodes --print "
        "--restarts --strategy --workers-per-node ARGS SCRIPT"
    ),
    "submit slurm": (
        "--account --array --checkpoint-every --cpus-per-worker --extra --name --nodes --notice --partition --print "
        "--requeues --strategy --time --workers --workers-per-node ARGS SCRIPT"
    ),
    "workers add": "--run COUNT",
    "workers remove": "--run RANK",
    "train": (
        "--check --checkpoint-every --data --epochs --json --lr --name --option --resume --seed --strategy --workers "
        "RECIPE"
    ),
    "profile": "--batch --device --input --json --option MODEL",
    "plan": (
        "--allow --batch --cluster --data --epochs --global-batch --input --json --memory --meshes "
        "--mtbf --option --per-layer --repair --target-accuracy --workers MODEL"
    ),
    "doctor": "--json --lab --network --workers",
    "status": "--json --stack RUN",
    "checkpoints": "--overwrite --step --to --verify RUN",
    "reproduce": "--data --name --quick --rate --report-only REPRODUCTION",
    "simulate run": (
        "--calibrate --chaos --cluster --data --epochs --jitter --json --lab --lr --mtbf --name --option --plot "
        "--repair --seed --slow --strategy --workers RECIPE"
    ),
    "simulate scaling": (
        "--accelerator --batch --cluster --json --model --plot --sample-time --steps --strategy --workers"
    ),
    "simulate clusters": "--toml WHICH",
    "bench step": "--json --models --rounds --workers",
    "bench allreduce": "--json --rounds --workers",
    "bench collectives": "--json --lab --plot --rounds --sizes --workers",
    "bench overhead": "--compiled --device --json --rounds RECIPE",
    "bench codecs": "--device --json --rounds --size",
    "bench faults": "--control-steps --json --kinds --lab --load --quick --repeats --seed",
    "bench fidelity": "--json --models --rates --steps --strategies",
    "bench compression": "--codecs --ddp-hooks --json --lab --rounds --strategy --workers MODEL",
    "bench strategies": "--batch --json --lab --post-local-sgd --rounds --slow --strategies --workers MODEL",
    "bench plan": "--json --models --rates --rounds --strategies",
    "bench meshes": "--json --lab --models --quick --rates --rounds --workers",
    "bench auto": "--json --lab --models --rounds --workers",
    "bench checkpoints": "--folder --json --kills --parts --quick --rounds --seed",
    "bench checks": "--json --model --rounds --workers",
    "bench control": "--json --lab --model --rounds --workers",
    "bench elastic": "--data --json --kills --model --only --parts --quick --seed --simulated",
    "bench encryption": "--json --lab --rounds --sizes",
    "bench hostile": "--connections --json --model --rate",
    "bench overlap": "--json --lab --models --rounds MODEL",
    "bench backend": "--json --lab --models --rounds --simulate --workers",
    "bench pipeline": "--batch --fixed-time --json --microbatches --plot --rounds --schedules --width --workers",
    "bench startup": "--json --rounds --workers",
    "bench rates": "--data --json --quick --recipes --seeds --strategies --workers",
    "lab run": "--hosts --latency --name --ranks-per-host --rate COMMAND",
    "lab list": "",
    "lab clear": "",
}
"""Arguments in capitals and options, by command."""


def found(command: object, words: tuple[str, ...] = ()) -> dict[str, str]:
    commands = getattr(command, "commands", None)
    if commands:
        return {key: value for name, inner in commands.items() for key, value in found(inner, (*words, name)).items()}
    parameters = getattr(command, "params", [])
    names = [each.opts[0] if each.param_type_name == "option" else each.name.upper() for each in parameters]
    return {" ".join(words): " ".join(sorted(name for name in names if name != "--help"))}


def test_commands_and_options() -> None:
    assert found(typer.main.get_command(app)) == OPTIONS


def test_every_option_has_a_help_text_that_is_a_sentence() -> None:
    def walk(command: object, words: tuple[str, ...]) -> None:
        for name, inner in getattr(command, "commands", {}).items():
            walk(inner, (*words, name))
        for parameter in getattr(command, "params", []):
            text = getattr(parameter, "help", None) or ""
            assert text[:1].isupper(), f"{' '.join(words)} {parameter.name}: {text!r}"
            assert text.rstrip().endswith("."), f"{' '.join(words)} {parameter.name}: {text!r}"
            if getattr(parameter, "is_flag", False):  # typer would show <bool>, as if a value had to follow.
                assert parameter.metavar == "", f"{' '.join(words)} {parameter.name} shows a value"

    walk(typer.main.get_command(app), ("tutti",))
