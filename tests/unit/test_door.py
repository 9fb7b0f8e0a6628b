"""What contributors and users of a release meet first: the pages name what exists, their commands work, the workflows run what
is there, and what is released says where it comes from."""

from __future__ import annotations

import email
import os
import re
import shlex
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders.wheels import ROOT

from scripts.harness.patience import patience
from sglang_uvm_offload import __version__

CONTRIBUTING, RELEASING = ROOT / "CONTRIBUTING.md", ROOT / "RELEASING.md"
PAGES = [CONTRIBUTING, RELEASING, ROOT / "SECURITY.md", ROOT / ".github/pull_request_template.md"]
GITHUB = ROOT / ".github"
YAML = sorted(path for path in GITHUB.rglob("*") if path.suffix in (".yml", ".yaml"))
FORMS = [path for path in YAML if path.parent.name == "ISSUE_TEMPLATE" and path.stem != "config"]
WORKFLOWS = [path for path in YAML if path.parent.name == "workflows"]
REPOSITORY = "https://github.com/sglang-uvm-offload/sglang-uvm-offload"
BY_PYTEST = ("scripts/unit.sh", "scripts/test.sh", "scripts/support.sh")
"""The scripts that take pytest's arguments."""
NEXT = "9.8.7"
NEEDS_NETWORK = ("python -m pip install", "python -m build", "python -m twine")
"""Starts of the commands of a release that are not run here. What they build is."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)
every_workflow = pytest.mark.parametrize("workflow", WORKFLOWS, ids=name_of)


def workflow_of(name: str) -> dict[str, Any]:
    return yaml.safe_load((GITHUB / f"workflows/{name}.yml").read_text())


def steps(workflow: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job["steps"]


def lines(workflow: dict[str, Any]) -> list[str]:
    return [line for step in steps(workflow) for line in step.get("run", "").splitlines()]


def run(script: str, folder: Path, **environment: str) -> str:
    words = ["bash", "-eu", "-o", "pipefail", "-c", script]
    done = subprocess.run(
        words, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=patience(120)
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ---- pages ----


def shown(page: str) -> list[str]:
    """The commands of a page: the lines of its indented blocks, and what a sentence has ``bash`` run."""
    return [line.strip() for line in re.findall(r"^ {4,}\S.*$", page, re.M)] + re.findall(r"`(bash [^`\n]+)`", page)


def paths(text: str) -> list[str]:
    """Files and folders of the repository that a text names in backticks, or links to."""
    quoted = [word for span in re.findall(r"`([^`\n]+)`", text) for word in span.split()]
    linked = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("https://")]
    return [word for word in [*quoted, *linked] if re.fullmatch(r"[\w.]+(/[\w.-]+)+|[\w.-]+\.(py|md|sh|toml|yaml)", word)]


def absent(text: str) -> list[str]:
    """Those that do not exist. A page of ``.github`` may be named without its folder, as GitHub does."""
    places = (ROOT, GITHUB / "workflows")
    return [path for path in paths(text) if not any((place / path).exists() for place in places)]


@every_page
def test_every_path_that_is_named_exists(page):
    text = page.read_text()
    assert absent(text) == []
    assert paths(text)


@pytest.mark.parametrize("page", [*PAGES, *YAML], ids=name_of)
def test_addresses_on_github_are_of_this_repository(page):
    found = re.findall(r"https://github\.com/[^\s)]+", page.read_text())
    assert [address for address in found if not address.startswith(f"{REPOSITORY}/")] == []


@every_page
def test_lines_are_short(page):
    assert [line for line in page.read_text().splitlines() if len(line) > 140] == []


def sections(page: str) -> list[str]:
    return re.split(r"^## ", page, flags=re.M)


def names_of_code(text: str) -> set[str]:
    return set(re.findall(r"`(\w*[A-Z_]\w*)`", text))


@pytest.mark.parametrize("section", sections(CONTRIBUTING.read_text()), ids=lambda text: text.splitlines()[0])
def test_a_name_of_the_code_is_in_a_file_that_its_section_names(section):
    code = "".join((ROOT / path).read_text() for path in paths(section) if path.endswith(".py"))
    assert [name for name in names_of_code(section) if not re.search(rf"^\s*(def |class )?{name}\b *[(:=]", code, re.M)] == []


# ---- commands ----


def problems(command: str) -> list[str]:
    """What is wrong with a command: a script that is none, an argument that names no test."""
    words = shlex.split(command, comments=True)
    scripts = [word for word in words if re.fullmatch(r"(\./)?[\w./-]+\.sh", word)]
    found = [f"{script}: no such script" for script in scripts if not (ROOT / script).is_file()]
    if words[:1] == ["bash"] and words[1] in BY_PYTEST:
        for argument in words[2:]:
            path, _, test = argument.partition("::")
            if "/" in path and not (ROOT / path).exists():
                found.append(f"{path}: no such test")
            elif test and f"def {test}(" not in (ROOT / path).read_text():
                found.append(f"{argument}: no such test")
    return found


@every_page
def test_commands_name_scripts_and_tests_that_exist(page):
    commands = shown(page.read_text())
    assert commands
    assert [problem for command in commands for problem in problems(command)] == []


# ---- .github ----


def test_the_forms_ask_for_what_a_report_needs():
    asked = {path.stem: {each["id"] for each in yaml.safe_load(path.read_text())["body"] if "id" in each} for path in FORMS}
    assert {"command", "doctor", "log", "versions", "machine"} <= asked["launch"]
    assert {"device", "driver", "commands", "results"} <= asked["gpu-run"]


@every_workflow
def test_a_workflow_runs_scripts_and_tests_that_exist(workflow):
    assert [problem for line in lines(workflow_of(workflow.stem)) for problem in problems(line)] == []


@every_workflow
def test_jobs_may_only_read_but_for_the_one_that_publishes(workflow):
    read = workflow_of(workflow.stem)
    assert read["permissions"] == {"contents": "read"}
    more = {name: job["permissions"] for name, job in read["jobs"].items() if "permissions" in job}
    assert more == ({"publish": {"id-token": "write"}} if workflow.stem == "release" else {})


def test_linters_of_every_change_are_those_of_the_test_script():
    tool = re.compile(r"^(ruff|mypy|codespell|git ls-files .*clang-format)\b.*$", re.M)
    run = "\n".join(lines(workflow_of("ci")))
    assert [m.group() for m in tool.finditer(run)] == [m.group() for m in tool.finditer((ROOT / "scripts/test.sh").read_text())]
    assert "bash scripts/unit.sh" in run.splitlines()


def test_what_is_published_is_what_was_built_and_checked():
    release = workflow_of("release")
    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML reads "on" as a boolean
    build, publish = release["jobs"]["build"], release["jobs"]["publish"]
    assert publish["needs"] == "build"
    kept = [step["with"] for step in build["steps"] if "upload-artifact" in step.get("uses", "")]
    taken = [step["with"] for step in publish["steps"] if "download-artifact" in step.get("uses", "")]
    assert [(each["name"], each["path"]) for each in kept] == [(each["name"], each["path"]) for each in taken] != []
    run = lines(release)
    assert run.index("python -m build") < run.index("python -m twine check --strict dist/*")


# ---- a release ----


@pytest.fixture(scope="module")
def commands() -> list[str]:
    return shown(RELEASING.read_text())


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the files of this one that a release changes, and another to which it pushes."""
    for name, value in (("NAME", "A Maintainer"), ("EMAIL", "maintainer@example.org")):
        monkeypatch.setenv(f"GIT_AUTHOR_{name}", value)
        monkeypatch.setenv(f"GIT_COMMITTER_{name}", value)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    folder = tmp_path / "checkout"
    for name in ("CHANGELOG.md", "README.md", "pyproject.toml", "sglang_uvm_offload/__init__.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    changes = folder / "CHANGELOG.md"
    if "- Unreleased" not in changes.read_text():  # just after a release
        changes.write_text(f"# Changelog\n\n## [{NEXT}] - Unreleased\n\n" + changes.read_text())
    run("git init --quiet --initial-branch=main && git add . && git commit --quiet --message start", folder)
    run(f"git init --quiet --bare '{tmp_path}/origin.git' && git remote add origin '{tmp_path}/origin.git'", folder)
    return folder


def released(commands: list[str], checkout: Path) -> None:
    """Run the commands in one shell, as they stand there but for the version and what needs the network."""
    first, *others = commands
    assert re.fullmatch(r"version=\d+\.\d+\.\d+", first)
    run("\n".join([f"version={NEXT}", *(each for each in others if not each.startswith(NEEDS_NETWORK))]), checkout)


def test_the_commands_of_a_release_set_the_version_and_push_its_tag(commands, checkout):
    before = (checkout / "CHANGELOG.md").read_text()
    released(commands, checkout)
    assert f'\n__version__ = "{NEXT}"\n' in (checkout / "sglang_uvm_offload/__init__.py").read_text()
    changed = [
        (was, now)
        for was, now in zip(before.splitlines(), (checkout / "CHANGELOG.md").read_text().splitlines(), strict=True)
        if was != now
    ]
    ((was, now),) = changed
    assert was.endswith(" - Unreleased")
    assert re.fullmatch(rf"## \[{re.escape(NEXT)}\] - \d{{4}}-\d\d-\d\d", now)
    assert run("git status --porcelain", checkout) == ""
    assert run("git log --format=%s", checkout).splitlines() == [f"Release {NEXT}", "start"]
    assert run(f"git cat-file -t v{NEXT}", checkout) == "tag", "annotated"
    pushed = dict(line.split()[::-1] for line in run("git ls-remote origin", checkout).splitlines())
    head = run("git rev-parse HEAD", checkout)
    assert pushed["refs/heads/main"] == pushed[f"refs/tags/v{NEXT}^{{}}"] == head


@pytest.fixture
def tag_check() -> str:
    (script,) = (step["run"] for step in steps(workflow_of("release")) if "GITHUB_REF_NAME" in step.get("run", ""))
    return script


def test_the_workflow_takes_the_tag_that_the_commands_make(commands, checkout, tag_check):
    released(commands, checkout)
    run(tag_check, checkout, GITHUB_REF_NAME=f"v{NEXT}")


@pytest.mark.parametrize("undone", ["sglang_uvm_offload/__init__.py", "CHANGELOG.md"])
def test_the_workflow_refuses_a_tag_of_another_version_than_either_file_has(commands, checkout, tag_check, undone):
    released(commands, checkout)
    run(f"git checkout --quiet HEAD~1 -- {undone}", checkout)
    with pytest.raises(AssertionError):
        run(tag_check, checkout, GITHUB_REF_NAME=f"v{NEXT}")


def test_the_commands_build_and_check_as_the_workflow_does(commands):
    building = [each for each in commands if each.startswith(NEEDS_NETWORK)]
    assert building == [line for line in lines(workflow_of("release")) if line.startswith("python -m")]


def test_the_changelog_begins_with_the_version_of_the_package_or_the_next():
    newest = re.findall(r"^## \[(\S+)\] - (Unreleased|\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert len(newest) == len(re.findall(r"^## ", (ROOT / "CHANGELOG.md").read_text(), re.M))
    assert __version__ in [version for version, _ in newest]
    assert [state for _, state in newest[1:] if state == "Unreleased"] == []


# ---- what is released ----


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    content = zipfile.ZipFile(wheel)
    (name,) = (name for name in content.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_string(content.read(name).decode())


def test_what_is_released_says_where_it_comes_from(metadata):
    urls = dict(each.split(", ") for each in metadata.get_all("Project-URL"))
    assert urls.keys() == {"Homepage", "Repository", "Documentation", "Changelog", "Issues"}
    assert all(url.split("#")[0] == REPOSITORY or url.startswith(f"{REPOSITORY}/") for url in urls.values())
    assert (ROOT / urls["Changelog"].removeprefix(f"{REPOSITORY}/blob/main/")).is_file()


def test_what_is_released_has_the_readme_as_its_description(metadata):
    found = metadata
    assert found["Description-Content-Type"] == "text/markdown"
    assert found.get_payload().strip() == (ROOT / "README.md").read_text().strip()
    assert (found["Version"], found["License-Expression"]) == (__version__, "Apache-2.0")
