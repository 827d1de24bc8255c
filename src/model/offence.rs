//! Values that are not finite, as they are counted and shown: who sent them, and what was done about them.
//!
//! Not here: the policy (`schema`), finding them (`apply`), how many are remembered (`shard::offence_journal`).

/// Who sent values that are not finite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// A session: a client, or a worker of a job that pushes by itself.
    Session(u64),
    /// A worker of a job, of whatever incarnation.
    Worker {
        /// The job's number.
        job: u64,
        /// Its rank in it.
        rank: u32,
    },
    /// Nobody alone: what a job's workers contributed to a step is finite, and its sum is not.
    Step {
        /// The job's number.
        job: u64,
    },
}

/// What was done about them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// The push was refused, whole.
    Rejected,
    /// The row was left out.
    Skipped,
    /// The row was brought into the finite range.
    Clipped,
}

impl Action {
    /// All of them, in the order of [`OffenceCounts`].
    pub const ALL: [Action; 3] = [Action::Rejected, Action::Skipped, Action::Clipped];

    /// In metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Action::Rejected => "rejected",
            Action::Skipped => "skipped",
            Action::Clipped => "clipped",
        }
    }
}

/// One value that is not finite; finite only where an encoding does not hold it.
#[derive(Debug, Clone, Copy)]
pub struct BadValue {
    /// The id of its row.
    pub id: u64,
    /// Its column.
    pub column: u32,
    /// Itself.
    pub value: f32,
    /// Each value that was sent is finite, and their sum is this.
    pub of_sum: bool,
}

/// Some rows of one table, and the first value of them that is not finite.
#[derive(Debug, Clone, Copy)]
pub struct BadRows {
    /// Rows that were left out or clipped, or pushes that were refused.
    pub count: u64,
    /// The first.
    pub first: BadValue,
}

impl BadRows {
    /// A single one.
    #[must_use]
    pub fn one(first: BadValue) -> Self {
        BadRows { count: 1, first }
    }
}

/// What one push did to one table.
#[derive(Debug, Clone, Copy)]
pub struct Offence {
    /// Who.
    pub source: Source,
    /// What was done about it.
    pub action: Action,
    /// Of what.
    pub rows: BadRows,
    /// When, in milliseconds since 1970.
    pub time_ms: u64,
}

/// Pushes rejected, rows skipped, rows clipped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OffenceCounts([u64; 3]);

impl OffenceCounts {
    /// Of one action.
    #[must_use]
    pub fn of(&self, action: Action) -> u64 {
        self.0[action as usize]
    }

    /// Adds `count` of an action.
    pub fn add(&mut self, action: Action, count: u64) {
        let known = &mut self.0[action as usize];
        *known = known.saturating_add(count);
    }

    /// Adds all of `other`.
    pub fn merge(&mut self, other: OffenceCounts) {
        Action::ALL.into_iter().for_each(|action| self.add(action, other.of(action)));
    }
}
