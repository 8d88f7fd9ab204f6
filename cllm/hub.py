"""Which file a model's name stands for: the model in the package, a local file, or a GGUF file on Hugging Face.

It owns names and quantisation tags, and fetches through huggingface_hub, so that cache, token and environment
variables (HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE) are those of every other program. It reads no model
file. A model that is in the cache is used without asking the hub; only `pull` looks for a newer one.

Parts of split files: the names that llama.cpp's gguf-split gives them.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

from .errors import ConfigError, ModelFileError

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

logger = logging.getLogger(__name__)

DEMO = "demo"
DEFAULT_QUANT = "Q4_K_M"
EXAMPLE = "unsloth/Qwen3-0.6B-GGUF:Q4_K_M"

_NAME = re.compile(r"([a-z0-9_][\w.-]*/[a-z0-9_][\w.-]*)(?::([\w.-]+))?", re.ASCII | re.IGNORECASE)
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})")
_QUANT = re.compile(
    r"(?:.*?[-.])??((?:UD-)?(?:I?Q\d|TQ\d|MXFP\d|BF16|FP?16|FP?32)\w*)", re.ASCII | re.IGNORECASE
)
_NO_MODEL = ("mmproj", "imatrix")  # GGUF files beside a model: a vision projector, quantisation statistics
_MOST_NAMES = 8  # in a message


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in Hugging Face's cache. `path` is its file, the first of a split one; `size` in bytes."""

    name: str
    path: str
    size: int


def is_hub_name(name: str) -> bool:
    """Whether `name` has the form USER/REPO[:QUANT]; nothing need exist under it."""
    match = _NAME.fullmatch(name)
    return match is not None and not match[1].lower().endswith(".gguf")


def model_path(name: str) -> str:
    """The GGUF file that `name` stands for: "demo", else a local file, else USER/REPO[:QUANT] on Hugging Face.

    One that is neither local nor in the cache is downloaded, with a progress bar on a terminal. Raises
    `ModelFileError` where there is none or it cannot be fetched.
    """
    return _path_here(name) or pull(name)


def cached_path(name: str) -> str:
    """As `model_path`, but nothing is downloaded: raises `ModelFileError` where the model is not here yet."""
    path = _path_here(name)
    if path is None:
        raise ModelFileError(
            f"not downloaded yet; fetch it with cllm models pull {name}, or {_instead()}", path=name
        )
    return path


def pull(name: str) -> str:
    """Downloads the newest files of USER/REPO[:QUANT] that the cache lacks; returns the path of the first.

    Without QUANT, Q4_K_M or the only model of the repository. Raises `ConfigError` for a name of another form,
    `ModelFileError` where the model does not exist or cannot be fetched.
    """
    if not is_hub_name(name):
        raise ConfigError(f"expected USER/REPO[:QUANT], as {EXAMPLE}; found {name!r}", field="model")
    repo, quant = _split_name(name)
    with _explained(name, repo), _quiet():
        from huggingface_hub import HfApi, constants

        api = HfApi()
        info = api.model_info(repo, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        repo_files = [file.rfilename for file in info.siblings or ()]
        chosen = _choose(name, quant, _group(repo_files))
        logger.info("fetching %s of %s", ", ".join(chosen.files), repo)
        paths = [api.hf_hub_download(repo, file) for file in chosen.files]
    return paths[0]


def cached_models() -> list[CachedModel]:
    """The complete GGUF models in Hugging Face's cache, by name. Of several versions, the one last pulled."""
    found = [model for repo in _cached_repos() for model in _models_of(repo).values()]
    return sorted(found, key=lambda model: model.name)


def part_paths(path: str) -> list[str]:
    """The paths of all parts of the split file that `path` names a part of; of another file, `path` alone."""
    folder, file = os.path.split(path)
    part = _PART.fullmatch(file.removesuffix(".gguf"))
    if part is None:
        return [path]
    stem, _, count = part.groups()
    return [os.path.join(folder, f"{stem}-{n:05d}-of-{count}.gguf") for n in range(1, int(count) + 1)]


# --- Names and tags -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Candidate:
    """One model of a repository: `tag` is what names it after the colon, `files` all its parts in order."""

    tag: str
    stem: str
    files: tuple[str, ...]


def _split_name(name: str) -> tuple[str, str | None]:
    match = _NAME.fullmatch(name)
    assert match is not None  # is_hub_name
    return match[1], match[2]


def _group(repo_files: Iterable[str]) -> list[_Candidate]:
    """The models among the files of a repository, in order of their names; incomplete split ones are left out."""
    parts: dict[tuple[str, int], list[str]] = defaultdict(list)
    for file in sorted(repo_files):
        stem, extension = os.path.splitext(file)
        if extension.lower() == ".gguf" and not os.path.basename(stem).lower().startswith(_NO_MODEL):
            part = _PART.fullmatch(stem)
            parts[(part[1], int(part[3])) if part else (stem, 1)].append(file)
    whole = [
        (os.path.basename(stem), tuple(found))
        for (stem, count), found in parts.items()
        if len(found) == count
    ]
    tags = Counter(_tag(stem).lower() for stem, _ in whole)
    # Where several models share a tag, each goes by its whole name.
    return [
        _Candidate(tag if tags[tag.lower()] == 1 else stem, stem, found)
        for stem, found in whole
        for tag in [_tag(stem)]
    ]


def _tag(stem: str) -> str:
    """The quantisation at the end of a file's name, or the whole name where it ends in none."""
    match = _QUANT.fullmatch(stem)
    return match[1] if match else stem


def _find(wanted: str, candidates: list[_Candidate]) -> list[_Candidate]:
    """Those whose tag is `wanted`, or else whose name ends in it, in upper or lower case."""
    wanted = wanted.lower().removesuffix(".gguf")
    exact = [model for model in candidates if wanted in (model.tag.lower(), model.stem.lower())]
    return exact or [m for m in candidates if m.stem.lower().endswith((f"-{wanted}", f".{wanted}"))]


def _choose(name: str, quant: str | None, candidates: list[_Candidate]) -> _Candidate:
    """The one model that `name` means. Raises `ModelFileError` that says what there is."""
    repo = _split_name(name)[0]
    if not candidates:
        raise ModelFileError(
            "this repository holds no complete GGUF model; look for one whose name ends in -GGUF", path=name
        )
    found = _find(quant or DEFAULT_QUANT, candidates)
    if len(found) == 1:
        return found[0]
    if quant is None and len(candidates) == 1:
        return candidates[0]
    there = ", ".join(model.tag for model in found or candidates)
    problem = f"{len(found)} models are" if found else "there is no"
    raise ModelFileError(
        f"{problem} {quant or DEFAULT_QUANT}; choose one of {there}, as {repo}:{(found or candidates)[0].tag}",
        path=name,
    )


# --- What is here -------------------------------------------------------------------------------------------


def _path_here(name: str) -> str | None:
    """Where the model lies on this machine, or None for a name that is to be fetched."""
    if name == DEMO:
        return str(files("cllm") / "assets" / "demo.gguf")
    if os.path.exists(name):
        return name
    if not is_hub_name(name):
        raise ModelFileError(
            f"no such file; a model is {DEMO}, the path of a .gguf file or USER/REPO[:QUANT], as {EXAMPLE}",
            path=name,
        )
    repo_id, quant = _split_name(name)
    models = {
        candidate: model
        for repo in _cached_repos()
        if repo.repo_id.lower() == repo_id.lower()
        for candidate, model in _models_of(repo).items()
    }
    found = _find(quant or DEFAULT_QUANT, list(models))
    return models[found[0]].path if len(found) == 1 else None


def _cached_repos() -> list[CachedRepoInfo]:
    """The model repositories in Hugging Face's cache."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return [repo for repo in scan_cache_dir(constants.HF_HUB_CACHE).repos if repo.repo_type == "model"]
    except CacheNotFound:
        return []


def _models_of(repo: CachedRepoInfo) -> dict[_Candidate, CachedModel]:
    """The complete models of one cached repository, each from the version pulled last."""
    newest_first = sorted(repo.revisions, key=lambda r: ("main" in r.refs, r.last_modified), reverse=True)
    models: dict[str, tuple[_Candidate, CachedModel]] = {}
    for revision in newest_first:
        sizes = {
            file.file_path.relative_to(revision.snapshot_path).as_posix(): file.size_on_disk
            for file in revision.files
        }
        for candidate in _group(sizes):
            path = str(revision.snapshot_path / candidate.files[0])
            size = sum(sizes[file] for file in candidate.files)
            model = CachedModel(f"{repo.repo_id}:{candidate.tag}", path, size)
            models.setdefault(candidate.tag, (candidate, model))
    return dict(models.values())


# --- What can go wrong --------------------------------------------------------------------------------------


@contextmanager
def _explained(name: str, repo: str) -> Iterator[None]:
    """Turns what huggingface_hub raises into a `ModelFileError` of one line that says what to do."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{repo}"
    try:
        yield
    except ModelFileError:
        raise
    except errors.GatedRepoError as error:
        reason = (
            f"this model is gated; accept its terms at {page} and set HF_TOKEN to a token of that account"
        )
        raise ModelFileError(reason, path=name) from error
    except errors.RepositoryNotFoundError as error:
        reason = f"no such file, and no such repository at {page}; check the name, and for a private one set HF_TOKEN"
        raise ModelFileError(reason, path=name) from error
    except errors.OfflineModeIsEnabled as error:
        reason = f"not in the cache ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE is set"
        raise ModelFileError(f"{reason}; {_instead()}", path=name) from error
    # Not only OSError: what a broken connection raises differs between the library's versions.
    except Exception as error:
        cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else error
        status = cause.response.status_code if isinstance(cause, errors.HfHubHTTPError) else None
        if status == 401:
            reason = f"{constants.ENDPOINT} refuses the token; set HF_TOKEN to a valid one, or unset it"
            raise ModelFileError(reason, path=name) from error
        detail = next(filter(None, str(cause).strip().splitlines()), "")
        reason = f"cannot fetch this from {constants.ENDPOINT}: {type(cause).__name__}: {detail}"
        raise ModelFileError(f"{reason}; try again, or {_instead()}", path=name) from error


def _instead() -> str:
    """What to type where the hub cannot be reached."""
    here = [DEMO, *(model.name for model in cached_models())]
    more = f" and {len(here) - _MOST_NAMES} more" if len(here) > _MOST_NAMES else ""
    return f"name a model that is here ({', '.join(here[:_MOST_NAMES])}{more}) or the path of a .gguf file"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps huggingface_hub from writing warnings beside our one line, unless what happens is to be logged."""
    from huggingface_hub.utils import logging as hub_logging

    before = hub_logging.get_verbosity()
    if not logger.isEnabledFor(logging.INFO):
        hub_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        hub_logging.set_verbosity(before)
