//! What can be wrong with a configuration.

/// A configuration was refused; the node does not start.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A field's value makes no sense.
    #[error("configuration: {name}: {problem}")]
    Field {
        /// The field, as in the TOML file.
        name: &'static str,
        /// What it must be.
        problem: String,
    },
    /// A key nobody knows, a value of the wrong type, or an unreadable file.
    #[error("configuration: {0}")]
    Source(Box<figment::Error>),
    /// An environment variable that names no field.
    #[error(
        "configuration: unknown environment variable {name}: the fields are those of `evershard server --print-config`"
    )]
    UnknownEnvironment {
        /// The variable.
        name: String,
    },
    /// The file named on the command line is not there.
    #[error("configuration: no such file: {path}")]
    NoFile {
        /// The path given.
        path: std::path::PathBuf,
    },
}
