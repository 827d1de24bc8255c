//! `evershardctl job remove JOB`.

use std::process::ExitCode;

use evershard_proto::v1::RemoveJobRequest;
use serde_json::json;

use crate::cli::{Global, Output};
use crate::confirm::confirm;
use crate::connection::Connection;
use crate::error::CtlError;
use crate::output;

pub(crate) async fn run(global: &Global, name: &str, yes: bool) -> Result<ExitCode, CtlError> {
    let connection = Connection::open(global).await?;
    let job = super::find(&connection, name).await?;
    if !yes {
        eprintln!("job {name} has these workers: {}; clocks and cursors will be forgotten", job.head_count());
        confirm("remove it?")?;
    }
    connection
        .call("remove a job", |node| async move {
            node.jobs().remove_job(RemoveJobRequest { name: name.to_owned() }).await
        })
        .await?;
    match global.output {
        Output::Json => output::json(&json!({ "removed": name }))?,
        Output::Table => eprintln!("job {name} is removed"),
    }
    Ok(ExitCode::SUCCESS)
}
