//! Crash points for tests: `EVERSHARD_FAILPOINTS="flush::before_meta=kill@2;..."` makes the process kill itself with
//! SIGKILL at the n-th pass of a point, and `name=fail@2` makes the first two passes of a point fail where it stands for an
//! error, `name=fail-after@N` the one pass after the first N, `name=fail-in@PART` every pass that has to do with a path that
//! PART is in. `name=hang@FILE` holds whoever passes the point for as long as
//! FILE exists. Only in builds with the feature `failpoints`; a release refuses the variable.

/// A failpoint setting that does not make sense; the process does not start.
#[derive(Debug, thiserror::Error)]
pub enum FailpointError {
    /// This build has no failpoints.
    #[error("EVERSHARD_FAILPOINTS is set, but this build has no failpoints (feature `failpoints`)")]
    NotBuiltIn,
    /// The setting does not parse.
    #[error(
        "EVERSHARD_FAILPOINTS: {setting:?} is not of the form name=kill@N, name=fail@N, name=fail-after@N, name=fail-in@PART or name=hang@FILE"
    )]
    Malformed {
        /// The part that does not parse.
        setting: String,
    },
}

/// Arms the points named in the environment.
///
/// # Errors
/// [`FailpointError`].
pub fn arm_from_environment() -> Result<(), FailpointError> {
    let Ok(settings) = std::env::var("EVERSHARD_FAILPOINTS") else { return Ok(()) };
    if settings.is_empty() {
        return Ok(());
    }
    arm(&settings)
}

#[cfg(not(feature = "failpoints"))]
fn arm(_settings: &str) -> Result<(), FailpointError> {
    Err(FailpointError::NotBuiltIn)
}

#[cfg(feature = "failpoints")]
fn arm(settings: &str) -> Result<(), FailpointError> {
    use std::sync::atomic::{AtomicU64, Ordering};

    for setting in settings.split(';').filter(|s| !s.is_empty()) {
        let malformed = || FailpointError::Malformed { setting: setting.to_string() };
        let (name, action) = setting.split_once('=').ok_or_else(malformed)?;
        if let Some(("fail", n)) = action.split_once('@') {
            let times = n.parse::<u32>().map_err(|_| malformed())?;
            fail::cfg(name, &format!("{times}*return")).map_err(|_| malformed())?;
            continue;
        }
        if let Some(("fail-after", n)) = action.split_once('@') {
            let passes = n.parse::<u32>().map_err(|_| malformed())?;
            fail::cfg(name, &format!("{passes}*off->1*return")).map_err(|_| malformed())?;
            continue;
        }
        if let Some(("fail-in", part)) = action.split_once('@') {
            fail::cfg(name, &format!("return({part})")).map_err(|_| malformed())?;
            continue;
        }
        if let Some(("hang", file)) = action.split_once('@') {
            let file = std::path::PathBuf::from(file);
            fail::cfg_callback(name, move || {
                while file.exists() {
                    std::thread::sleep(std::time::Duration::from_millis(10));
                }
            })
            .map_err(|_| malformed())?;
            continue;
        }
        let pass = match action.split_once('@') {
            Some(("kill", n)) => n.parse::<u64>().map_err(|_| malformed())?,
            None if action == "kill" => 1,
            _ => return Err(malformed()),
        };
        let passes = AtomicU64::new(0);
        let point = name.to_string();
        fail::cfg_callback(name, move || {
            if passes.fetch_add(1, Ordering::SeqCst) + 1 == pass {
                eprintln!("evershard: failpoint {point} reached for the {pass}. time: kill -9");
                // SAFETY: getpid and kill have no preconditions; the process ends here, as by `kill -9`.
                unsafe {
                    libc::kill(libc::getpid(), libc::SIGKILL);
                }
            }
        })
        .map_err(|_| malformed())?;
    }
    Ok(())
}
