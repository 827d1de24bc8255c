//! The rows of a table in one shard's part: a merge of its runs.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::Selection;
use super::batch::Batch;
use super::cursor::Cursor;
use crate::manifest::ShardEntry;
use crate::run::RunShape;
use crate::target::{Target, TargetError};

/// Rows of a batch, and floats.
const BATCH_ROWS: usize = 1024;
const BATCH_FLOATS: usize = 1 << 18;

#[derive(Debug)]
pub(super) struct PartRows {
    target: Target,
    table: u32,
    selection: Selection,
    cursors: Vec<(usize, Cursor)>,
    /// By the key that a run stands at, or begins with; of equal keys the run of the latest link first.
    next: BinaryHeap<Reverse<(u64, Reverse<usize>, usize)>>,
    /// By link: rows of lower versions are none.
    floors: Vec<u64>,
    /// The key that was decided last: what has it still says what was before. Runs may begin at it that are not open yet, behind the
    /// end of a batch too.
    last: Option<u64>,
}

impl PartRows {
    pub(super) fn new(target: &Target, shard: &ShardEntry, table: u32, selection: Selection) -> Self {
        let mut floors = vec![0; shard.links.len()];
        let mut floor = 0;
        for (number, link) in shard.links.iter().enumerate().rev() {
            floor = floor.max(link.floors.get(&table).copied().unwrap_or(0));
            floors[number] = floor;
        }
        let (mut cursors, mut above) = (Vec::new(), None);
        for (number, link) in shard.links.iter().enumerate() {
            for run in link.runs.iter().filter(|run| run.table == table) {
                if run.first_key <= *selection.keys.end() && run.last_key >= *selection.keys.start() {
                    cursors.push((number, Cursor::new(*run, (above, link.cut))));
                }
            }
            above = Some(link.cut);
        }
        let at = |(place, (link, cursor)): (usize, &(usize, Cursor))| {
            Reverse((cursor.first_key(), Reverse(*link), place))
        };
        let next = cursors.iter().enumerate().map(at).collect();
        PartRows { target: target.clone(), table, selection, cursors, next, floors, last: None }
    }

    /// Moves the run on; one that is behind its last row, or behind the last key that is wanted, is closed.
    async fn move_on(&mut self, link: Reverse<usize>, place: usize) -> Result<(), TargetError> {
        let (_, cursor) = &mut self.cursors[place];
        let key = if cursor.is_open() {
            cursor.advance(&self.target).await?
        } else {
            cursor.open(&self.target, *self.selection.keys.start()).await?
        };
        match key.filter(|key| key <= self.selection.keys.end()) {
            Some(key) => self.next.push(Reverse((key, link, place))),
            None => *cursor = Cursor::closed(cursor),
        }
        Ok(())
    }

    /// Adds rows to the batch until it is full, or there are no more.
    pub(super) async fn next_rows(
        &mut self,
        batch: &mut Batch,
        shape: &mut Option<RunShape>,
    ) -> Result<(), TargetError> {
        let mut floats = 0;
        while batch.len() < BATCH_ROWS && floats < BATCH_FLOATS {
            let Some(Reverse((key, link, place))) = self.next.pop() else { return Ok(()) };
            let (_, cursor) = &self.cursors[place];
            if let Some(row) = cursor.row() {
                // Of equal keys the latest link comes first, and the others say what it was before.
                let is_first = self.last != Some(key);
                self.last = Some(key);
                let found = cursor.shape().unwrap_or(RunShape { dim: 0, state: 0, notes: 0 });
                if *shape.get_or_insert(found) != found {
                    let what = format!("the rows of table {} have {found:?}, others {shape:?}", self.table);
                    let target = self.target.url().to_owned();
                    return Err(TargetError::Contradiction { target, path: cursor.path(), what });
                }
                let is_row = row.head.is_live() || (self.selection.counting && row.head.is_counting());
                if is_first && is_row && row.head.version >= self.floors[link.0] {
                    batch.push(&row, found);
                    floats += found.floats(&row.head);
                }
            }
            self.move_on(link, place).await?;
        }
        Ok(())
    }
}
