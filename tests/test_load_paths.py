"""No code of ours can unpack an archive, load a pickle, evaluate text or start a shell: read from its syntax tree."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(
    path for name in ("longstraw_core", "pipelines", "components", "images") for path in (ROOT / name).rglob("*.py")
)
MODULES = {
    **dict.fromkeys(("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"), "loads code with data"),
    **dict.fromkeys(("zipfile", "tarfile", "gzip", "bz2", "lzma", "zlib", "zstandard"), "unpacks"),
}
CALLS = {
    **dict.fromkeys(("eval", "exec", "compile", "__import__"), "evaluates text"),
    **dict.fromkeys(("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"), "starts a shell"),
    **dict.fromkeys(("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"), "YAML that makes objects"),
    **dict.fromkeys(("torch.load", "numpy.load", "np.load", "pandas.read_pickle"), "loads a pickle"),
    "shutil.unpack_archive": "unpacks",
    "tempfile.mktemp": "a name that somebody else can take",
}
SAFE_LOADERS = {"yaml.SafeLoader", "yaml.CSafeLoader"}


def name_of(node: ast.expr) -> str:
    """`a.b.c` of a name or attribute, empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := name_of(node.value)):
        return f"{base}.{node.attr}"
    return ""


def complaints(source: str) -> list[str]:
    """What a module does that none of ours may, as `line: what`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or "", *(f"{node.module}.{name}" for name in modules)]
            for name in modules:
                why = MODULES.get(name.partition(".")[0]) or CALLS.get(name)
                found += [f"{node.lineno}: {name}: {why}"] if why else []
        if isinstance(node, ast.Call):
            called = name_of(node.func)
            loaders = {name_of(keyword.value) for keyword in node.keywords if keyword.arg == "Loader"}
            if called in CALLS and not loaders & SAFE_LOADERS:
                found.append(f"{node.lineno}: {called}: {CALLS[called]}")
            for keyword in node.keywords:
                value = keyword.value.value if isinstance(keyword.value, ast.Constant) else "not a constant"
                if keyword.arg in ("shell", "allow_pickle", "trust_remote_code") and value is not False:
                    found.append(f"{node.lineno}: {called}: {keyword.arg}={value}")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_unpacks_evaluates_or_loads_a_pickle(path: Path) -> None:
    assert complaints(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import zipfile as z",
        "from tarfile import open",
        "from shutil import unpack_archive",
        "import shutil; shutil.unpack_archive(name)",
        "eval(text)",
        "import torch; torch.load(path)",
        "import yaml; yaml.load(text)",
        "import yaml; yaml.load(text, Loader=yaml.Loader)",
        "from yaml import unsafe_load",
        "import subprocess; subprocess.run(command, shell=True)",
        "import subprocess; subprocess.run(command, shell=yes)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
    ],
)
def test_each_of_them_would_be_found(line: str) -> None:
    assert complaints(line)


def test_what_only_looks_like_it_is_left_alone() -> None:
    assert (
        complaints("import yaml\nyaml.load(t, Loader=yaml.CSafeLoader)\nmodel.eval()\nre.compile(p)\nf(shell=False)")
        == []
    )
