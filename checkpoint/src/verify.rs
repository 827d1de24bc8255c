//! Looks at every byte of a checkpoint: hash, crc32, order and number of rows of each run against the manifest, versions against their
//! links, floats; and counts and digests the rows of each table, as they would be restored.
//!
//! Invariant: every file that is missing or damaged is named, not only the first.
//!
//! Not here: the merge (`crate::reader`).

use evershard_proto::digest::Digest;

use crate::manifest::{Content, FileKind};
use crate::reader::{Batch, Selection, TableRows};
use crate::run::RunDecoder;
use crate::target::{Target, TargetError};

/// What verifying found.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Verified {
    /// Files that were looked at.
    pub files: u64,
    /// Their bytes, as the manifest says.
    pub bytes: u64,
    /// Every table of the checkpoint; none, when a file of rows is missing or damaged.
    pub tables: Vec<VerifiedTable>,
    /// What is wrong; nothing, when the checkpoint is whole.
    pub problems: Vec<String>,
    /// Whether the store could not be reached at some time: another time the checkpoint may be whole.
    pub store_failed: bool,
}

/// A table, as it would be restored.
#[derive(Debug, Clone, PartialEq)]
pub struct VerifiedTable {
    /// Its name.
    pub name: String,
    /// Its permanent number.
    pub number: u32,
    /// Live rows.
    pub rows: u64,
    /// Counting records.
    pub counting: u64,
    /// Live rows with a weight or a state that is not finite. No damage: rows may have come to that.
    pub non_finite: u64,
    /// Of live rows and counting records.
    pub digest: String,
}

impl Verified {
    /// Whether the checkpoint is whole.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.problems.is_empty()
    }

    fn add(&mut self, error: &TargetError) {
        self.store_failed |= error.is_of_the_store();
        let text = error.to_string();
        if !self.problems.contains(&text) {
            self.problems.push(text);
        }
    }
}

/// Looks at a whole checkpoint, and tells after each file how many bytes were looked at.
pub async fn verify(target: &Target, content: &Content, mut tell: impl FnMut(u64)) -> Verified {
    let mut found = Verified::default();
    for file in content.files() {
        if let Err(error) = look_at(target, file).await {
            found.add(&error);
        }
        found.files += 1;
        found.bytes += file.bytes;
        tell(found.bytes);
    }
    if !found.problems.is_empty() {
        return found;
    }
    for table in &content.tables {
        match table_of(target, content, (&table.name, table.number)).await {
            Ok(verified) => {
                if (verified.rows, &verified.digest) != (table.rows, &table.digest) {
                    found.problems.push(format!(
                        "table {}: the manifest says {} rows with digest {}, there are {} with {}",
                        table.name, table.rows, table.digest, verified.rows, verified.digest
                    ));
                }
                found.tables.push(verified);
            }
            Err(error) => found.add(&error),
        }
    }
    found
}

async fn look_at(target: &Target, file: crate::manifest::FileEntry) -> Result<(), TargetError> {
    let mut stream = target.read_file(file).await?;
    let mut decoder = RunDecoder::new(stream.path());
    let wrong = |source| TargetError::Run { target: target.url().to_owned(), source };
    // What the bytes are is known first: of a damaged file that is the thing to say.
    let mut bad = None;
    while let Some(piece) = stream.next().await? {
        if file.kind == FileKind::Run && bad.is_none() {
            decoder.feed(&piece);
            loop {
                match decoder.block() {
                    Ok(Some(_)) => {}
                    Ok(None) => break,
                    Err(error) => {
                        bad = Some(error);
                        break;
                    }
                }
            }
        }
    }
    match (bad, file.kind) {
        (Some(error), _) => Err(wrong(error)),
        (None, FileKind::Run) => decoder.finish().map_err(wrong),
        (None, FileKind::State) => Ok(()),
    }
}

async fn table_of(
    target: &Target,
    content: &Content,
    (name, number): (&str, u32),
) -> Result<VerifiedTable, TargetError> {
    let mut rows = TableRows::new(target, content, number, Selection::all());
    let (mut batch, mut digest) = (Batch::default(), Digest::default());
    let (mut live, mut counting, mut non_finite) = (0, 0, 0);
    while rows.next_batch(&mut batch).await? {
        for row in batch.rows() {
            digest.add(number, row.key, row.head.steps, row.weights, (row.values, row.notes));
            live += u64::from(row.head.is_live());
            counting += u64::from(row.head.is_counting());
            non_finite += u64::from(row.values.iter().any(|value| !value.is_finite()));
        }
    }
    let (name, digest) = (name.to_owned(), digest.to_string());
    Ok(VerifiedTable { name, number, rows: live, counting, non_finite, digest })
}
