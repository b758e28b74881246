"""The command `zerostage`. torch and transformers are imported only where a subcommand needs them."""

from __future__ import annotations

import os
import re
import sys

import click

from zerostage import __version__
from zerostage.audit_command import audit
from zerostage.checkpoint.commands import export, inspect
from zerostage.mistakes import InputError, closest
from zerostage.planning.command import plan
from zerostage.train import config as settings


class TrainCommand(click.Command):
    """A command with one option per field of TrainConfig; a list option takes several values in a row."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        for name, field in settings.TrainConfig.model_fields.items():
            kind, default = settings.kind(name), field.get_default(call_default_factory=True)
            # The defaults of these follow from the others, as their descriptions say.
            plain = not field.is_required() and name not in ("ranks", "global_batch") and default not in ("", [])
            shown = f"{field.description} [{default}]" if plain else field.description
            if kind is bool:
                option = click.Option([f"{settings.flag(name)}/--no-{settings.flag(name)[2:]}"], default=None, help=shown)
            else:
                metavar = {int: "N", float: "X", list: "FILE..."}.get(kind, "TEXT")
                choices = settings.choices(name)
                metavar = "|".join(choices) if choices else metavar
                option = click.Option([settings.flag(name)], multiple=kind is list, metavar=metavar, help=shown)
            self.params.append(option)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        lists = {settings.flag(name) for name in settings.TrainConfig.model_fields if settings.kind(name) is list}
        spread, current = [], None
        for position, arg in enumerate(args):
            if arg.startswith("-"):
                current = arg if arg in lists else None
            elif current and args[position - 1] != current:
                spread.append(current)
            spread.append(arg)
        return super().parse_args(ctx, spread)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__)
def group() -> None:
    """Plan, train and audit ZeRO data parallelism on PyTorch."""


@group.command(cls=TrainCommand)
@click.option("--config", "path", metavar="FILE", help="TOML file with any of the fields below; flags win over it")
def train(path: str | None, **flags) -> None:
    """Fine-tune a Hugging Face causal language model under a ZeRO stage.

    Starts its own ranks on this machine; under torchrun or Slurm it joins the job that is there.
    """
    from zerostage.train import data, launch, model_folder

    flags = {name: value for name, value in flags.items() if value not in (None, ())}
    flags = {name: list(value) if isinstance(value, tuple) else value for name, value in flags.items()}
    joined = launch.place(os.environ)
    config = settings.load(path, flags, os.environ if joined else None)
    if not joined and not config.given("ranks"):
        config.ranks = launch.default_ranks(config.device)
    settings.derive_batch(config)
    if joined:
        sys.exit(launch.run_rank(_train, config))
    # Mistakes that can be seen from here are told before any rank starts.
    data.check_files([*config.data, *config.eval_data])
    model_folder.find(config.model)
    if config.ranks == 1 and not config.max_restarts:
        sys.exit(launch.run_rank(_train, config))
    command = [sys.executable, "-m", "zerostage.cli", *sys.argv[1:]]
    sys.exit(launch.start(command, config.ranks, config.device, config.max_restarts))


def _train(config: settings.TrainConfig) -> None:
    from zerostage.train.loop import train

    train(config)


group.add_command(plan)
group.add_command(audit)
group.add_command(export)
group.add_command(inspect)


@group.command()
@click.option("--ranks", type=int, metavar="N", help="processes to measure with [one per GPU; 2 on the CPU]")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="what to measure [cuda where there is a GPU]")
@click.option("--out", default="calibration.json", show_default=True, metavar="FILE", help="JSON file to write")
@click.option("--seconds", default=10.0, show_default=True, metavar="X", help="about how long to measure, beside starting")
def calibrate(ranks: int | None, device: str | None, out: str, seconds: float) -> None:
    """Measure matrix products, memory and collectives here, for the planner.

    Starts its own ranks on this machine; under torchrun or Slurm it joins the job that is there.
    """
    from zerostage.planning.inputs import calibrate as calibration

    sys.exit(calibration.command(ranks, device, out, seconds))


def main() -> None:
    """The entry point: errors in what the user gave are one line on stderr and exit code 2."""
    # A rank ends at once on Ctrl-C; the launcher, which starts it, speaks for all.
    if "RANK" in os.environ:
        from zerostage.train.launch import quiet_interrupt

        quiet_interrupt()
    try:
        sys.exit(group.main(prog_name="zerostage", standalone_mode=False))
    except InputError as error:
        message = str(error)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.NoSuchOption as error:
        names = [name for option in error.ctx.command.params for name in option.opts] if error.ctx else []
        message = f"there is no flag {error.option_name}{closest(error.option_name, names)}" + _see(error)
    except click.UsageError as error:
        words = error.format_message().rstrip(".")
        if isinstance(error.ctx and error.ctx.command, click.Group):
            asked = re.search(r"No such command '(.*?)'", words)
            if asked:
                words = f"there is no command {asked[1]}" + closest(asked[1], error.ctx.command.commands)
        message = words + _see(error)
    except (KeyboardInterrupt, click.Abort):
        print("\nstopped", file=sys.stderr)
        sys.exit(130)
    print(f"zerostage: {message}", file=sys.stderr)
    sys.exit(2)


def _see(error: click.UsageError) -> str:
    return f" ({error.ctx.command_path} --help lists what there is)" if error.ctx else ""


if __name__ == "__main__":
    main()
