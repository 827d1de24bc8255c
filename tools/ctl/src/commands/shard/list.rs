//! `evershardctl shard list`.

use std::process::ExitCode;

use serde_json::json;

use crate::cli::{Global, Output};
use crate::commands::status::ClusterView;
use crate::error::CtlError;
use crate::output;

pub(crate) async fn run(global: &Global) -> Result<ExitCode, CtlError> {
    let view = ClusterView::gather(global, false).await?;
    match global.output {
        Output::Json => output::json(&json!({ "shards": view.shards }))?,
        Output::Table => output::print(&view.shards_table(true))?,
    }
    Ok(ExitCode::SUCCESS)
}
