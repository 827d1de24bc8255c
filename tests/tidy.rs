//! Holds the house in order: who may depend on whom, what every file begins with, what no file may contain.
//!
//! The plan of the house is in docs/architecture/; this test is what makes it true.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand};

/// Who may name whom (of ours). Tests may name more: see `TEST_ARROWS`.
const ARROWS: [(&str, &[&str]); 10] = [
    ("evershard-proto", &[]),
    ("evershard-storage", &[]),
    ("evershard-raft", &["evershard-storage", "evershard-proto"]),
    ("evershard-checkpoint", &["evershard-proto"]),
    ("evershard", &["evershard-checkpoint", "evershard-raft", "evershard-storage", "evershard-proto"]),
    ("evershard-client", &["evershard-proto"]),
    ("evershard-formats", &[]),
    ("evershardctl", &["evershard-checkpoint", "evershard-client", "evershard-proto"]),
    ("evershard-bench", &["evershard-client", "evershard-proto"]),
    ("evershard-python", &["evershard-client", "evershard-proto"]),
];
/// The server's tests drive it as its users do; the tests of every format share their tools.
const TEST_ARROWS: [(&str, &str); 6] = [
    ("evershard", "evershard-client"),
    ("evershard", "evershard-formats"),
    ("evershard-proto", "evershard-formats"),
    ("evershard-storage", "evershard-formats"),
    ("evershard-raft", "evershard-formats"),
    ("evershard-checkpoint", "evershard-formats"),
];
/// Crates that only one room may name.
const ONLY: [(&str, &str); 4] = [
    ("rocksdb", "evershard-storage"),
    ("openraft", "evershard-raft"),
    ("openraft-rt-tokio", "evershard-raft"),
    ("pyo3", "evershard-python"),
];
/// Lines of a file, tests at its end not counted.
const LINES_MAX: usize = 500;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn metadata() -> Metadata {
    MetadataCommand::new()
        .no_deps()
        .other_options(vec!["--offline".to_owned()])
        .exec()
        .expect("cargo metadata")
}

/// Every file that git keeps, or would.
fn tracked() -> Vec<PathBuf> {
    let output = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .expect("git ls-files");
    assert!(output.status.success(), "git ls-files failed: {}", String::from_utf8_lossy(&output.stderr));
    let names = String::from_utf8(output.stdout).expect("names are UTF-8");
    let mut files: Vec<PathBuf> =
        names.split('\0').filter(|name| !name.is_empty()).map(PathBuf::from).collect();
    // Removed, but not committed yet.
    files.retain(|file| root().join(file).is_file());
    files.sort();
    files.dedup();
    files
}

fn read(file: &Path) -> Option<String> {
    // Pictures are not text.
    String::from_utf8(std::fs::read(root().join(file)).expect("a tracked file is readable")).ok()
}

fn with_extension<'a>(files: &'a [PathBuf], extension: &str) -> impl Iterator<Item = &'a PathBuf> {
    files.iter().filter(move |file| file.extension().is_some_and(|found| found == extension))
}

fn assert_none(problems: Vec<String>, rule: &str) {
    assert!(problems.is_empty(), "{rule}:\n  {}", problems.join("\n  "));
}

#[test]
fn arrows_between_crates_point_one_way() {
    let metadata = metadata();
    let allowed: BTreeMap<&str, &[&str]> = ARROWS.into_iter().collect();
    let ours: BTreeSet<String> = metadata.packages.iter().map(|package| package.name.to_string()).collect();
    let mut problems = Vec::new();
    for package in &metadata.packages {
        let name = package.name.to_string();
        let Some(targets) = allowed.get(name.as_str()) else {
            problems.push(format!("{name} has no arrows in tests/tidy.rs: say what it may depend on"));
            continue;
        };
        for dependency in package.dependencies.iter().filter(|dependency| ours.contains(&dependency.name)) {
            let to = dependency.name.as_str();
            let for_tests =
                dependency.kind == DependencyKind::Development && TEST_ARROWS.contains(&(name.as_str(), to));
            if !targets.contains(&to) && !for_tests {
                problems.push(format!("{name} -> {to}"));
            }
        }
    }
    assert_none(problems, "arrows that the plan does not have");
}

#[test]
fn each_engine_is_named_by_one_room_only() {
    let mut problems = Vec::new();
    for package in &metadata().packages {
        for (engine, room) in ONLY {
            if package.name.as_str() != room
                && package.dependencies.iter().any(|dependency| dependency.name == engine)
            {
                problems.push(format!("{} names {engine}, which belongs to {room}", package.name));
            }
        }
    }
    assert_none(problems, "walls broken");
}

#[test]
fn every_rust_file_says_what_it_is_for() {
    let files = tracked();
    let silent = with_extension(&files, "rs").filter(|file| {
        let text = read(file).unwrap_or_default();
        !text.starts_with("//!")
    });
    assert_none(silent.map(|file| file.display().to_string()).collect(), "files that do not begin with //!");
}

#[test]
fn files_stay_small() {
    let files = tracked();
    let mut problems = Vec::new();
    for file in with_extension(&files, "rs").filter(|file| !is_test(file)) {
        let text = read(file).unwrap_or_default();
        // Tests at the end of a file do not count: they may be as many as they are.
        let production = text.split("\n#[cfg(test)]\nmod ").next().unwrap_or(&text);
        let lines = production.lines().count();
        if lines > LINES_MAX {
            problems.push(format!("{}: {lines} lines", file.display()));
        }
    }
    assert_none(problems, "files over 500 lines: give the parts rooms of their own");
}

fn is_test(file: &Path) -> bool {
    file.components().any(|part| part.as_os_str() == "tests") || file.ends_with("tests.rs")
}

#[test]
fn nothing_is_left_unfinished() {
    // Put together here, so that this file does not find itself.
    let marks = [
        ["FIX", "ME"].concat(),
        ["XX", "X"].concat(),
        ["todo", "!("].concat(),
        ["unimple", "mented!("].concat(),
    ];
    let files = tracked();
    let mut problems = Vec::new();
    for file in files.iter().filter(|file| is_source(file)) {
        for (number, line) in read(file).unwrap_or_default().lines().enumerate() {
            for mark in marks.iter().filter(|mark| line.contains(mark.as_str())) {
                problems.push(format!("{}:{}: {mark}", file.display(), number + 1));
            }
        }
    }
    assert_none(problems, "marks of unfinished work");
}

/// Apply gives the same on every replica and at every time (design 4, rule 4): the rooms that it is made of know no clock,
/// no randomness, and no function whose last bit depends on the platform.
#[test]
fn what_applies_entries_is_deterministic() {
    const ROOMS: [&str; 4] = ["src/apply", "src/model", "src/optimizer", "src/meta/state.rs"];
    const BANNED: [&str; 12] = [
        "Instant",
        "SystemTime",
        "rand::",
        "RandomState",
        ".powf(",
        ".powi(",
        ".exp(",
        ".ln(",
        ".sin(",
        ".cos(",
        ".mul_add(",
        "thread",
    ];
    let files = tracked();
    let mut problems = Vec::new();
    let in_rooms = |file: &&PathBuf| ROOMS.iter().any(|room| file.starts_with(room)) && !is_test(file);
    for file in with_extension(&files, "rs").filter(in_rooms) {
        let text = read(file).unwrap_or_default();
        let production = text.split("\n#[cfg(test)]\nmod ").next().unwrap_or(&text);
        for (number, line) in production.lines().enumerate() {
            let code = line.split("//").next().unwrap_or(line);
            for banned in BANNED.iter().filter(|banned| code.contains(**banned)) {
                problems.push(format!("{}:{}: {banned}", file.display(), number + 1));
            }
        }
    }
    assert_none(problems, "what replicas may disagree on");
}

fn is_source(file: &Path) -> bool {
    file.extension().and_then(|extension| extension.to_str()).is_some_and(|extension| {
        matches!(extension, "rs" | "py" | "pyi" | "sh" | "toml" | "proto" | "md" | "yml" | "yaml")
    })
}

#[test]
fn no_file_knows_the_machine_it_was_written_on() {
    let places = [
        ["/ro", "ot/"].concat(),
        ["/wo", "rk/"].concat(),
        ["/ho", "me/"].concat(),
        ["crates", ".io"].concat(),
        ["pypi", ".org"].concat(),
        ["pythonhosted", ".org"].concat(),
        ["deb.deb", "ian.org"].concat(),
        ["docs", ".rs"].concat(),
    ];
    let files = tracked();
    let mut problems = Vec::new();
    // Cargo writes the index it used into the lock file; that is its format.
    for file in files.iter().filter(|file| !file.ends_with("Cargo.lock") && !file.ends_with("LICENSE")) {
        let Some(text) = read(file) else { continue };
        for (number, line) in text.lines().enumerate() {
            for place in places.iter().filter(|place| line.contains(place.as_str())) {
                problems.push(format!("{}:{}: {place}", file.display(), number + 1));
            }
        }
    }
    assert_none(problems, "places of one machine, or hosts of registries");
}

#[test]
fn paths_named_in_the_docs_exist() {
    let files = tracked();
    let mut problems = Vec::new();
    for file in with_extension(&files, "md") {
        let text = read(file).unwrap_or_default();
        for named in named_paths(&text) {
            let from_root = root().join(&named);
            let from_file = root().join(file).parent().expect("a file has a folder").join(&named);
            if !from_root.exists() && !from_file.exists() {
                problems.push(format!("{}: {named}", file.display()));
            }
        }
    }
    assert_none(problems, "paths in the docs that lead nowhere");
}

/// What a document names as a file of ours: in backquotes or as a link, with a folder and an extension we use.
fn named_paths(text: &str) -> BTreeSet<String> {
    let mut paths = BTreeSet::new();
    let quoted = text.split('`').skip(1).step_by(2);
    let linked = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    for candidate in quoted.chain(linked) {
        let candidate = candidate.split(['#', ':']).next().unwrap_or_default().trim_start_matches("./");
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '/' | '.' | '_' | '-');
        let in_house = [
            "src/",
            "proto/",
            "storage/",
            "raft/",
            "tools/",
            "python/",
            "tests/",
            "docs/",
            "scripts/",
            "demo/",
            "examples/",
        ]
        .iter()
        .any(|room| candidate.starts_with(room));
        let is_file = Path::new(candidate).extension().is_some_and(|e| e != "png" && e != "json");
        if in_house && is_file && candidate.chars().all(plain) {
            paths.insert(candidate.to_owned());
        }
    }
    paths
}

#[test]
fn the_path_reader_reads_what_documents_write() {
    let text = "see `src/dev/mod.rs`, [the plan](docs/plan.md#part), `cargo test`, `src/{a,b}.rs`, `demo/report.json`";
    let expected: BTreeSet<String> = ["src/dev/mod.rs", "docs/plan.md"].map(str::to_owned).into();
    assert_eq!(named_paths(text), expected);
}

#[test]
fn the_licence_is_there() {
    let text = read(Path::new("LICENSE")).expect("LICENSE is text");
    assert!(text.contains("Apache License") && text.contains("Version 2.0"));
}
