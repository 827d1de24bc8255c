//! A run that is being merged: at most one block of it is in memory.

use crate::manifest::RunEntry;
use crate::run::{Block, RunDecoder, RunShape, StoredRow};
use crate::target::{FileStream, Target, TargetError};

#[derive(Debug)]
pub(super) struct Cursor {
    entry: RunEntry,
    /// Versions of its rows are above the first and at most the second.
    versions: (Option<u64>, u64),
    open: Option<Open>,
}

#[derive(Debug)]
struct Open {
    file: FileStream,
    decoder: RunDecoder,
    shape: RunShape,
    block: Option<Block>,
    at: usize,
}

impl Cursor {
    pub(super) fn new(entry: RunEntry, versions: (Option<u64>, u64)) -> Self {
        Cursor { entry, versions, open: None }
    }

    /// What is left of one that is done: no file, no block.
    pub(super) fn closed(done: &Cursor) -> Self {
        Cursor { entry: done.entry, versions: done.versions, open: None }
    }

    pub(super) fn path(&self) -> String {
        self.entry.file().path()
    }

    /// Its first key, before it is opened.
    pub(super) fn first_key(&self) -> u64 {
        self.entry.first_key
    }

    pub(super) fn is_open(&self) -> bool {
        self.open.is_some()
    }

    pub(super) fn shape(&self) -> Option<RunShape> {
        self.open.as_ref().map(|open| open.shape)
    }

    fn contradiction(&self, target: &Target, what: String) -> TargetError {
        TargetError::Contradiction { target: target.url().to_owned(), path: self.entry.file().path(), what }
    }

    /// Opens it, and goes to its first row with a key from `from` on. Answers that key; `None`: there is none.
    pub(super) async fn open(&mut self, target: &Target, from: u64) -> Result<Option<u64>, TargetError> {
        let file = target.read_run(&self.entry).await?;
        let decoder = RunDecoder::new(file.path());
        let shape = RunShape { dim: 0, state: 0, notes: 0 };
        self.open = Some(Open { file, decoder, shape, block: None, at: 0 });
        let mut key = self.next_block(target).await?;
        while let Some(found) = key
            && found < from
        {
            key = self.advance(target).await?;
        }
        Ok(key)
    }

    /// Goes to the next block. Answers its first key; `None` behind the last, when the whole file was right.
    async fn next_block(&mut self, target: &Target) -> Result<Option<u64>, TargetError> {
        let Some(mut open) = self.open.take() else { return Ok(None) };
        let wrong = |source| TargetError::Run { target: target.url().to_owned(), source };
        loop {
            if let Some(block) = open.decoder.block().map_err(wrong)? {
                let first = block.row_at(0).map(|(row, _)| row.key);
                (open.block, open.at) = (Some(block), 0);
                self.open = Some(open);
                self.check_version(target)?;
                return Ok(first);
            }
            let Some(piece) = open.file.next().await? else {
                open.decoder.finish().map_err(wrong)?;
                return Ok(None);
            };
            let had_head = open.decoder.head().map_err(wrong)?.is_some();
            open.decoder.feed(&piece);
            if let Some(head) = open.decoder.head().map_err(wrong)?
                && !had_head
            {
                let said = (self.entry.table, self.entry.rows, self.entry.first_key, self.entry.last_key);
                let found = (head.table, head.rows, head.first_key, head.last_key);
                if said != found {
                    let what =
                        format!("its head says table, rows and keys {found:?}, its manifest says {said:?}");
                    return Err(self.contradiction(target, what));
                }
                open.shape = head.shape;
            }
        }
    }

    /// The row that it stands at.
    pub(super) fn row(&self) -> Option<StoredRow<'_>> {
        let open = self.open.as_ref()?;
        open.block.as_ref()?.row_at(open.at).map(|(row, _)| row)
    }

    fn check_version(&self, target: &Target) -> Result<(), TargetError> {
        let Some(row) = self.row() else { return Ok(()) };
        let (above, up_to) = self.versions;
        if row.head.version > up_to || above.is_some_and(|above| row.head.version <= above) {
            let (key, version) = (row.key, row.head.version);
            let what = format!(
                "row {key:016x} is of version {version}, which is not of its link: ({above:?}, {up_to}]"
            );
            return Err(self.contradiction(target, what));
        }
        Ok(())
    }

    /// Goes to the next row. Answers its key; `None` behind the last, when the whole file was right.
    pub(super) async fn advance(&mut self, target: &Target) -> Result<Option<u64>, TargetError> {
        if let Some(open) = &mut self.open
            && let Some(block) = &open.block
            && let Some((_, next)) = block.row_at(open.at)
            && let Some((row, _)) = block.row_at(next)
        {
            open.at = next;
            let key = row.key;
            self.check_version(target)?;
            return Ok(Some(key));
        }
        self.next_block(target).await
    }
}
