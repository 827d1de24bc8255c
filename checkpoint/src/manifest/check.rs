//! What a manifest must be: see the [module](super).

use std::collections::{BTreeMap, BTreeSet};

use evershard_proto::limits::CURSOR_BYTES_MAX;

use super::content::{Content, JobEntry, TableEntry};
use super::error::ManifestError;
use super::part::{FileKind, Link, LinkKind, RunEntry, ShardEntry};
use super::{LINKS_MAX, METADATA_BYTES_MAX, METADATA_ENTRIES_MAX, RUNS_MAX, STATE_BYTES_MAX};
use crate::hash::FileHash;
use crate::run::RUN_BYTES_MAX;

fn invalid<T>(place: impl Into<String>, what: impl Into<String>) -> Result<T, ManifestError> {
    Err(ManifestError::Invalid { place: place.into(), what: what.into() })
}

impl Content {
    /// Holds the content to the invariants of the [module](super).
    ///
    /// # Errors
    /// [`ManifestError::Invalid`], with the place.
    pub fn check(&self) -> Result<(), ManifestError> {
        if self.cluster.is_empty() {
            return invalid("cluster", "it is of no cluster");
        }
        if !(self.hold_ms.is_finite() && self.wait_ms.is_finite()) {
            return invalid("hold_ms, wait_ms", "no durations");
        }
        let metadata_bytes: usize = self.metadata.iter().map(|(name, value)| name.len() + value.len()).sum();
        if self.metadata.len() > METADATA_ENTRIES_MAX || metadata_bytes > METADATA_BYTES_MAX {
            let what =
                format!("at most {METADATA_ENTRIES_MAX} entries of {METADATA_BYTES_MAX} bytes together");
            return invalid("metadata", what);
        }
        if !self.tables.is_sorted_by(|a, b| a.number < b.number) {
            return invalid("tables", "their numbers do not ascend");
        }
        let names: BTreeSet<&str> = self.tables.iter().map(|table| table.name.as_str()).collect();
        if names.len() != self.tables.len() {
            return invalid("tables", "two of them have one name");
        }
        self.tables.iter().try_for_each(check_table)?;
        if !self.jobs.is_sorted_by(|a, b| a.name < b.name) {
            return invalid("jobs", "their names do not ascend");
        }
        self.jobs.iter().try_for_each(check_job)?;
        let mut files = Files::default();
        let mut next_key = Some(0);
        for shard in &self.shards {
            if next_key != Some(shard.first_key) || shard.last_key < shard.first_key {
                return invalid(
                    format!("shard {}", shard.shard),
                    "its keys do not follow those of the shard before",
                );
            }
            next_key = shard.last_key.checked_add(1);
            check_shard(shard, &mut files)?;
        }
        if next_key.is_some() {
            return invalid("shards", "they do not cover all keys");
        }
        if self.shards.iter().map(|shard| shard.shard).collect::<BTreeSet<_>>().len() != self.shards.len() {
            return invalid("shards", "two of them have one number");
        }
        if files.runs > RUNS_MAX {
            return invalid("shards", format!("{} runs, more than {RUNS_MAX}", files.runs));
        }
        let sum = files.known.values().try_fold(0_u64, |sum, (bytes, _)| sum.checked_add(*bytes));
        if sum != Some(self.bytes_total) {
            return invalid("bytes_total", format!("{}, its files have {sum:?}", self.bytes_total));
        }
        if self.bytes_added > self.bytes_total {
            return invalid("bytes_added", "more than there are");
        }
        Ok(())
    }
}

fn check_table(table: &TableEntry) -> Result<(), ManifestError> {
    let place = format!("table {}", table.number);
    match table.decode() {
        Ok(definition) if definition.name == table.name && !table.name.is_empty() => {}
        Ok(definition) => {
            return invalid(place, format!("is called {:?} and {:?}", table.name, definition.name));
        }
        Err(error) => return invalid(place, format!("its definition: {error}")),
    }
    if table.digest.len() != 32 || !table.digest.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return invalid(place, format!("{:?} is no digest", table.digest));
    }
    Ok(())
}

fn check_job(job: &JobEntry) -> Result<(), ManifestError> {
    let place = format!("job {:?}", job.name);
    match job.decode() {
        Ok(definition) if definition.name == job.name => {}
        Ok(definition) => return invalid(place, format!("is called {:?} as well", definition.name)),
        Err(error) => return invalid(place, format!("its definition: {error}")),
    }
    if !job.workers.is_sorted_by(|a, b| a.rank < b.rank) {
        return invalid(place, "the ranks of its workers do not ascend");
    }
    if job.workers.iter().any(|worker| worker.cursor.len() > CURSOR_BYTES_MAX) {
        return invalid(place, format!("a cursor has at most {CURSOR_BYTES_MAX} bytes"));
    }
    Ok(())
}

/// By file, its length and crc32.
#[derive(Default)]
struct Files {
    known: BTreeMap<(FileKind, FileHash), (u64, u32)>,
    runs: usize,
}

impl Files {
    fn add(&mut self, place: &str, file: super::part::FileEntry) -> Result<(), ManifestError> {
        let said = (file.bytes, file.crc32);
        if *self.known.entry((file.kind, file.hash)).or_insert(said) != said {
            return invalid(place, format!("{} is said to have two lengths or checksums", file.path()));
        }
        Ok(())
    }
}

fn check_shard(shard: &ShardEntry, files: &mut Files) -> Result<(), ManifestError> {
    let place = format!("shard {}", shard.shard);
    if shard.state.bytes > STATE_BYTES_MAX {
        return invalid(place, "its small state is too long");
    }
    files.add(&place, shard.state.file())?;
    if shard.links.len() > LINKS_MAX {
        return invalid(place, format!("more than {LINKS_MAX} links"));
    }
    if !shard.links.is_sorted_by(|a, b| a.cut < b.cut) {
        return invalid(place, "the cuts of its links do not ascend");
    }
    if shard.links.last().is_none_or(|last| last.cut != shard.cut) {
        return invalid(place, "its last link is of another cut");
    }
    for (number, link) in shard.links.iter().enumerate() {
        let expected = if number == 0 { LinkKind::Base } else { LinkKind::Delta };
        check_link(shard, link, expected, files).map_err(|error| match error {
            ManifestError::Invalid { what, .. } => {
                ManifestError::Invalid { place: format!("{place}, link {number}"), what }
            }
            other => other,
        })?;
    }
    Ok(())
}

fn check_link(
    shard: &ShardEntry,
    link: &Link,
    expected: LinkKind,
    files: &mut Files,
) -> Result<(), ManifestError> {
    if link.kind != expected {
        return invalid("", "a chain is a base, and then deltas");
    }
    if link.floors.values().any(|floor| *floor > link.cut) {
        return invalid("", "a table was cleared behind its cut");
    }
    for run in &link.runs {
        check_run(shard, run)?;
        files.add("", run.file())?;
        files.runs += 1;
    }
    Ok(())
}

fn check_run(shard: &ShardEntry, run: &RunEntry) -> Result<(), ManifestError> {
    let name = run.file().path();
    if run.first_key > run.last_key || run.first_key < shard.first_key || run.last_key > shard.last_key {
        return invalid("", format!("the keys of {name} are not the shard's"));
    }
    if run.bytes > RUN_BYTES_MAX as u64 + (16 << 20) || run.rows == 0 {
        return invalid("", format!("{name} cannot be a run: {} bytes, {} rows", run.bytes, run.rows));
    }
    Ok(())
}
