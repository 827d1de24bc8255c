//! Where the configuration comes from, and which source wins.

use figment::Figment;
use figment::providers::{Env, Format, Serialized, Toml};

use super::cli::ServerArgs;
use super::{ConfigError, ServerConfig};

/// `EVERSHARD_*` variables that are not fields of the server's configuration.
const OTHER_VARIABLES: [&str; 9] =
    ["CACHE", "ENDPOINTS", "FAILPOINTS", "BIN", "KILLS", "LOG", "OUTPUT", "TEST", "BENCH"];

/// Flags over environment over file over defaults, validated.
///
/// # Errors
/// [`ConfigError`]: an unknown key, an unreadable file, or a value that makes no sense.
pub fn load(args: &ServerArgs) -> Result<ServerConfig, ConfigError> {
    let mut figment = Figment::from(Serialized::defaults(ServerConfig::default()));
    if let Some(path) = &args.config {
        if !path.is_file() {
            return Err(ConfigError::NoFile { path: path.clone() });
        }
        figment = figment.merge(Toml::file_exact(path));
    }
    let fields = field_names();
    for (name, _) in std::env::vars_os() {
        let Some(name) = name.to_str().and_then(|n| n.strip_prefix("EVERSHARD_")) else { continue };
        let known = fields.iter().any(|field| field.eq_ignore_ascii_case(name));
        let other = OTHER_VARIABLES.iter().any(|o| name == *o || name.starts_with(&format!("{o}_")));
        if !known && !other {
            return Err(ConfigError::UnknownEnvironment { name: format!("EVERSHARD_{name}") });
        }
    }
    let names: Vec<&str> = fields.iter().map(String::as_str).collect();
    figment = figment.merge(Env::prefixed("EVERSHARD_").only(&names));
    figment = figment.merge(Serialized::defaults(args));
    let config: ServerConfig = figment.extract().map_err(|e| ConfigError::Source(Box::new(e)))?;
    config.validate()
}

fn field_names() -> Vec<String> {
    match serde_json::to_value(ServerConfig::default()) {
        Ok(serde_json::Value::Object(fields)) => fields.keys().cloned().collect(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_win_over_the_file_and_unknown_keys_are_errors() {
        let directory = tempfile::tempdir().expect("tempdir");
        let path = directory.path().join("node.toml");
        std::fs::write(&path, "node_id = 3\nheartbeat_ms = 20\n").expect("write");
        let mut args = ServerArgs { config: Some(path.clone()), node_id: Some(5), ..ServerArgs::default() };
        let config = load(&args).expect("valid");
        assert_eq!((config.node_id, config.heartbeat_ms), (5, 20));

        std::fs::write(&path, "node_idd = 3\n").expect("write");
        let error = load(&args).expect_err("a typo").to_string();
        assert!(error.contains("node_idd"), "{error}");

        args.config = Some(directory.path().join("absent.toml"));
        assert!(matches!(load(&args), Err(ConfigError::NoFile { .. })));
    }
}
