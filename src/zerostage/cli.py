"""The command `zerostage`. torch and transformers are imported only where a subcommand needs them."""

from __future__ import annotations

import json
import os
import re
import sys

import click

from zerostage import __version__
from zerostage.mistakes import InputError, closest
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
    """Plan and train ZeRO data parallelism on PyTorch."""


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
    if config.ranks == 1:
        sys.exit(launch.run_rank(_train, config))
    sys.exit(launch.start([sys.executable, "-m", "zerostage.cli", *sys.argv[1:]], config.ranks, config.device))


def _train(config: settings.TrainConfig) -> None:
    from zerostage.train.loop import train

    train(config)


@group.command()
@click.option("--params", required=True, metavar="N", help="number of parameters: 70.6e9, 7B or 135M")
@click.option("--ranks", default="8,16,32,64", show_default=True, metavar="N,N", help="numbers of data-parallel ranks")
@click.option("--json", "as_json", is_flag=True, help="whole bytes as JSON instead of tables")
def plan(params: str, ranks: str, as_json: bool) -> None:
    """Print what each stage holds and sends per rank, for mixed-precision Adam."""
    from zerostage.planning import memory, report

    table = memory.table(_parameters(params), _ranks(ranks))
    if as_json:
        click.echo(json.dumps(table, indent=2))
    else:
        from rich.console import Console

        report.show(Console(highlight=False), table)


def _parameters(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:[._]\d+)*(?:e\+?\d+)?)([kmbt]?)", text.strip().lower())
    number = float(match[1].replace("_", "")) if match and match[1].count(".") <= 1 else 0
    if not 1 <= number < 1e18:
        raise InputError(f"--params is {text!r}: give a number of parameters such as 70.6e9, 7B or 135M")
    return number * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[match[2]]


def _ranks(text: str) -> list[int]:
    parts = text.replace(" ", "").split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"--ranks is {text!r}: give whole numbers of 1 or more with commas between, such as 8,16,32")
    return [int(part) for part in parts]


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
