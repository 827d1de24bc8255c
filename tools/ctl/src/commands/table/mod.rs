//! `evershardctl table ...`.

mod get;
mod list;
mod non_finite;
mod set_optimizer;
mod show;

use std::process::ExitCode;

use clap::Subcommand;
use evershard_proto::v1::{Routing, TableDefinition, TableDescription};

use crate::cli::Global;
use crate::error::CtlError;

/// The tables and their rows.
#[derive(Debug, Subcommand)]
pub(crate) enum TableCommand {
    /// Show every table.
    #[command(
        after_help = "Example:\n  evershardctl table list --output json | jq '.tables[] | {name, rows}'"
    )]
    List,
    /// Show one table: its optimizer, its initial values, its size, and who pushed what is not finite.
    #[command(
        after_help = "Example:\n  evershardctl table show items\n  evershardctl table show items --output json | jq .non_finite_counts.sources"
    )]
    Show {
        /// The table's name.
        table: String,
    },
    /// Show one row, and whether it was ever pushed.
    Get(get::GetArgs),
    SetOptimizer(set_optimizer::SetOptimizerArgs),
}

pub(crate) async fn run(global: &Global, command: &TableCommand) -> Result<ExitCode, CtlError> {
    match command {
        TableCommand::List => list::run(global).await,
        TableCommand::Show { table } => show::run(global, table).await,
        TableCommand::Get(args) => get::run(global, args).await,
        TableCommand::SetOptimizer(args) => set_optimizer::run(global, args).await,
    }
}

/// The table of this name.
pub(crate) fn find<'a>(
    routing: &'a Routing,
    name: &str,
) -> Result<(&'a TableDescription, &'a TableDefinition), CtlError> {
    let named = |table: &'a TableDescription| table.definition.as_ref().map(|definition| (table, definition));
    let mut tables = routing.tables.iter().filter_map(named);
    tables.find(|(_, definition)| definition.name == name).ok_or_else(|| {
        let names: Vec<&str> =
            routing.tables.iter().filter_map(named).map(|(_, d)| d.name.as_str()).collect();
        let existing = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        CtlError::Unknown { what: "table", name: name.to_owned(), existing }
    })
}
