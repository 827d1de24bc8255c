//! Holds docs/formats.md to the code: every magic, golden file and fuzz test of the source is in its tables, and what its
//! tables name exists.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Every file that git keeps, or would.
fn tracked() -> Vec<String> {
    let output = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .expect("git ls-files");
    let names = String::from_utf8(output.stdout).expect("names are UTF-8");
    let is_there = |name: &&str| !name.is_empty() && root().join(name).is_file();
    names.split('\0').filter(is_there).map(str::to_owned).collect()
}

fn sources() -> Vec<(String, String)> {
    let read = |name: String| {
        let text = std::fs::read_to_string(root().join(&name)).expect("source is text");
        (name, text)
    };
    tracked()
        .into_iter()
        .filter(|name| name.ends_with(".rs") && name != "tests/formats.rs")
        .map(read)
        .collect()
}

/// The rows of the tables: cells without the spaces around them.
fn rows() -> Vec<Vec<String>> {
    let text = std::fs::read_to_string(root().join("docs/formats.md")).expect("docs/formats.md");
    let cells = |line: &str| line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect();
    let is_row = |line: &&str| line.starts_with("| ") && !line.starts_with("| format ");
    text.lines().filter(is_row).map(cells).collect()
}

/// What stands in backquotes in the tables.
fn quoted() -> BTreeSet<String> {
    let cells = rows().into_iter().flatten();
    cells.flat_map(|cell| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>()).collect()
}

#[test]
fn every_golden_file_is_in_the_tables() {
    let is_golden = |name: &String| name.contains("golden/") || name.contains("/golden_");
    let ours = |name: &String| !name.starts_with("tests/optimizer_golden/");
    let quoted = quoted();
    let missing: Vec<String> =
        tracked().into_iter().filter(is_golden).filter(ours).filter(|name| !quoted.contains(name)).collect();
    assert!(missing.is_empty(), "golden files that docs/formats.md does not name: {missing:?}");
}

#[test]
fn what_the_tables_name_exists() {
    let fuzz = fuzz_tests();
    for name in quoted() {
        let exists = if name.starts_with("fuzz_") {
            fuzz.contains(&name)
        } else {
            Path::new(&root()).join(&name).is_file()
        };
        assert!(exists, "docs/formats.md names {name}");
    }
    assert!(rows().len() > 20, "the tables are read: {:?}", rows());
    for row in rows() {
        assert!(row.last().is_some_and(|cell| cell.contains("fuzz_")), "no fuzz test: {row:?}");
    }
}

/// Property tests named `fuzz_...`.
fn fuzz_tests() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (_, text) in sources() {
        for rest in text.split("fn fuzz_").skip(1) {
            let name: String = rest.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
            found.insert(format!("fuzz_{name}"));
        }
    }
    found
}

#[test]
fn every_fuzz_test_is_in_the_tables() {
    let quoted = quoted();
    let missing: Vec<String> = fuzz_tests().into_iter().filter(|name| !quoted.contains(name)).collect();
    assert!(missing.is_empty(), "fuzz tests that docs/formats.md does not name: {missing:?}");
}

#[test]
fn every_magic_is_in_the_tables_beside_its_file() {
    let mut found = 0;
    for (file, text) in sources() {
        let production = text.split("\n#[cfg(test)]\nmod ").next().unwrap_or(&text);
        for line in production.lines().filter(|line| line.trim_start().starts_with("const MAGIC")) {
            let magic = line.split('"').nth(1).expect("a byte string").trim_end_matches("\\0");
            let version = production
                .lines()
                .find_map(|line| line.strip_prefix("const VERSION: u32 = "))
                .and_then(|rest| rest.split(';').next())
                .unwrap_or_else(|| panic!("{file} has a magic and no version"));
            let is_it =
                |row: &Vec<String>| row[1] == format!("`{file}`") && row[2] == magic && row[3] == version;
            assert!(
                rows().iter().any(is_it),
                "docs/formats.md has no row for {file}, {magic}, version {version}"
            );
            found += 1;
        }
    }
    assert!(found >= 5, "magics are found: {found}");
}
