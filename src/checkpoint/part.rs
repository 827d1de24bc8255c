//! Writing a part.
//!
//! Memory: a run of each table on its way, together [`RUN_BYTES`], and [`RUNS_WAITING`] complete ones.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use evershard_checkpoint::manifest::{Link, LinkKind, RunEntry, StateEntry};
use evershard_checkpoint::run::{RowHead, Run, RunError, RunShape, RunWriter};
use evershard_checkpoint::target::{Target, TargetError};
use evershard_storage::table::{RowHeader, RowShape};
use tokio::sync::mpsc;

use crate::shard::{CutBegun, CutSink, CutTable, CutTicket, SkipReason};

/// Bytes of a run, about.
const RUN_BYTES: usize = 8 << 20;
/// Runs that wait for the target.
const RUNS_WAITING: usize = 2;

/// A shard's part.
#[derive(Debug, Clone)]
pub struct Part {
    /// The last link of its chain.
    pub link: Link,
    /// The small state as of the cut.
    pub state: StateEntry,
    /// Term of the cut's entry.
    pub term: u64,
    /// Every table as of the cut.
    pub tables: Vec<CutTable>,
    /// Bytes that were not at the target before.
    pub bytes_added: u64,
}

/// How far a part is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Written {
    /// Rows of the runs that were put.
    pub rows: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// A part was not written.
#[derive(Debug, thiserror::Error)]
pub enum PartError {
    /// The replica cannot give its rows.
    #[error("the replica {0}")]
    Skipped(SkipReason),
    /// A row that no run takes.
    #[error("a run of the part: {0}")]
    Run(#[from] RunError),
    /// The target did not take a file.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The thread that reads rows ended by itself.
    #[error("the thread that reads rows panicked")]
    Panicked,
}

/// Writes the rows of a cut that was applied, and tells after each run how far it is. Whoever drops it ends it: the thread stops at its
/// next run, and its ticket goes with it.
///
/// # Errors
/// [`PartError`]: files that were put stay until somebody collects them.
pub async fn write_part(
    ticket: CutTicket,
    begun: CutBegun,
    target: &Target,
    mut tell: impl FnMut(Written),
) -> Result<Part, PartError> {
    let (complete, mut runs) = mpsc::channel(RUNS_WAITING);
    let shapes = ticket.shapes();
    let reading = tokio::task::spawn_blocking(move || {
        let is_wanted = complete.clone();
        let mut sink = RunSink { shapes, open: BTreeMap::new(), bytes: 0, complete, problem: None };
        let rows = ticket.rows(&mut sink, &mut || !is_wanted.is_closed());
        sink.end(rows.map(|rows| rows.tables).map_err(PartError::Skipped))
    });
    let (mut entries, mut written, mut bytes_added): (Vec<RunEntry>, _, _) =
        (Vec::new(), Written::default(), 0);
    while let Some(run) = runs.recv().await {
        let (entry, is_new) = target.put_run(&run).await?;
        written.rows += entry.rows;
        written.bytes += entry.bytes;
        bytes_added += if is_new { entry.bytes } else { 0 };
        entries.push(entry);
        tell(written);
    }
    let tables = reading.await.map_err(|_| PartError::Panicked)??;
    let (state, is_new) = target.put_state(&begun.small_state).await?;
    bytes_added += if is_new { state.bytes } else { 0 };
    entries.sort_by_key(|run| (run.table, run.first_key, run.hash));
    let kind = if begun.above.is_some() { LinkKind::Delta } else { LinkKind::Base };
    let link = Link { kind, cut: begun.index, runs: entries, floors: begun.cleared };
    Ok(Part { link, state, term: begun.term, tables, bytes_added })
}

/// Rows of a table on their way to a run.
#[derive(Default)]
struct Open {
    heads: Vec<(u64, RowHead, usize)>,
    floats: Vec<f32>,
    bytes: usize,
}

struct RunSink {
    shapes: BTreeMap<u32, RowShape>,
    open: BTreeMap<u32, Open>,
    /// Of all that is open.
    bytes: usize,
    complete: mpsc::Sender<Run>,
    problem: Option<RunError>,
}

impl CutSink for RunSink {
    fn row(&mut self, table: u32, key: u64, header: RowHeader, floats: &[f32]) -> ControlFlow<()> {
        let open = self.open.entry(table).or_default();
        let head = RowHead { version: header.version, steps: header.steps, flags: header.flags };
        let start = open.floats.len();
        open.floats.extend_from_slice(floats);
        open.heads.push((key, head, start));
        let bytes = size_of::<(u64, RowHead, usize)>() + size_of_val(floats);
        open.bytes += bytes;
        self.bytes += bytes;
        if self.bytes < RUN_BYTES {
            return ControlFlow::Continue(());
        }
        // The longest: others may still get long.
        let longest = self.open.iter().max_by_key(|(_, open)| open.bytes).map(|(table, _)| *table);
        longest.map_or(ControlFlow::Continue(()), |table| self.complete(table))
    }
}

impl RunSink {
    fn complete(&mut self, table: u32) -> ControlFlow<()> {
        let Some(open) = self.open.remove(&table) else { return ControlFlow::Continue(()) };
        self.bytes -= open.bytes;
        match self.runs_of(table, open) {
            Ok(flow) => flow,
            Err(error) => {
                self.problem = Some(error);
                ControlFlow::Break(())
            }
        }
    }

    /// Rows come from memory in no order, and from the store in that of their keys.
    fn runs_of(&self, table: u32, open: Open) -> Result<ControlFlow<()>, RunError> {
        let shape = self.shapes.get(&table).copied().unwrap_or(RowShape::plain(1, 0));
        let shape = RunShape { dim: shape.dim, state: shape.state, notes: shape.notes };
        let Open { mut heads, floats, .. } = open;
        heads.sort_unstable_by_key(|(key, ..)| *key);
        let mut run = RunWriter::new(table, shape)?;
        for (key, head, start) in heads {
            if run.is_full() {
                let full = std::mem::replace(&mut run, RunWriter::new(table, shape)?).finish()?;
                if self.complete.blocking_send(full).is_err() {
                    return Ok(ControlFlow::Break(()));
                }
            }
            run.push(key, head, &floats[start..start + shape.floats(&head)])?;
        }
        let is_taken = run.is_empty() || self.complete.blocking_send(run.finish()?).is_ok();
        Ok(if is_taken { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
    }

    /// What is open still, and what became of it all.
    fn end(mut self, rows: Result<Vec<CutTable>, PartError>) -> Result<Vec<CutTable>, PartError> {
        let tables: Vec<u32> = self.open.keys().copied().collect();
        let mut flow = if rows.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) };
        for table in tables {
            if flow.is_continue() {
                flow = self.complete(table);
            }
        }
        match (self.problem, rows) {
            (Some(problem), _) => Err(problem.into()),
            (None, Ok(_)) if flow.is_break() => Err(PartError::Skipped(SkipReason::Stopped)),
            (None, rows) => rows,
        }
    }
}
