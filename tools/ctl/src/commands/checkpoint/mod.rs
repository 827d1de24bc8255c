//! `evershardctl checkpoint ...`. All but `create` read the target alone: they need no cluster.

mod create;
mod list;
mod show;
mod verify;

use std::process::ExitCode;

use clap::Subcommand;
use evershard_checkpoint::name::CheckpointName;
use evershard_checkpoint::target::Target;

use crate::cli::Global;
use crate::error::CtlError;

/// Checkpoints of the whole cluster, in a directory or a bucket.
#[derive(Debug, Subcommand)]
pub(crate) enum CheckpointCommand {
    /// Create a checkpoint: exact at one point between two steps of every job. Training goes on meanwhile.
    Create(create::CreateArgs),
    /// Show the checkpoints of a target.
    #[command(after_help = "Examples:
  evershardctl checkpoint list --from file:///ckpt
  evershardctl checkpoint list --from s3://bucket/model --output json | jq -r '.checkpoints[-1].name'")]
    List {
        /// The directory or bucket: file:///path, s3://bucket/path, gs://, az://.
        #[arg(long, value_name = "URL")]
        from: String,
    },
    /// Show what a checkpoint holds: tables, shards, jobs with their workers' clocks.
    #[command(after_help = "Example:\n  evershardctl checkpoint show day-1 --from file:///ckpt")]
    Show {
        /// The checkpoint's name.
        name: CheckpointName,
        /// The directory or bucket.
        #[arg(long, value_name = "URL")]
        from: String,
    },
    /// Look at every byte of a checkpoint. Exit code 1 when it is not whole.
    #[command(
        after_help = "Reads all of its files, and counts and digests the rows as they would be restored.

Example:
  evershardctl checkpoint verify day-1 --from file:///ckpt"
    )]
    Verify {
        /// The checkpoint's name.
        name: CheckpointName,
        /// The directory or bucket.
        #[arg(long, value_name = "URL")]
        from: String,
    },
}

pub(crate) async fn run(global: &Global, command: &CheckpointCommand) -> Result<ExitCode, CtlError> {
    match command {
        CheckpointCommand::Create(args) => create::run(global, args).await,
        CheckpointCommand::List { from } => list::run(global, &Target::open(from)?).await,
        CheckpointCommand::Show { name, from } => show::run(global, &Target::open(from)?, name).await,
        CheckpointCommand::Verify { name, from } => verify::run(global, &Target::open(from)?, name).await,
    }
}

/// When something was, for people: UTC, to the second.
fn when(ms: u64) -> String {
    // Days since 1970 to a date, as the proleptic Gregorian calendar has it (Hinnant, "chrono-compatible low-level date algorithms").
    let (days, seconds) = (ms / 86_400_000, ms / 1000 % 86_400);
    let shifted = days + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}")
}

#[cfg(test)]
mod tests {
    use super::when;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(when(0), "1970-01-01 00:00:00");
        assert_eq!(when(951_782_399_999), "2000-02-28 23:59:59");
        assert_eq!(when(951_782_400_000), "2000-02-29 00:00:00");
        assert_eq!(when(1_796_169_600_000), "2026-12-02 00:00:00");
    }
}
