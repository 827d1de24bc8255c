//! Where a development cluster keeps its things, and what it remembers of its first start.
//!
//! ```text
//! D/dev.json           settings of the first start        D/endpoints        URLs, comma-separated, one line
//! D/control            unix socket of the living parent   D/lock             held by the living parent
//! D/node-<id>/{pid,log,data}
//! ```

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{DevArgs, DevError};
use crate::config::Durability;

/// The directory of a development cluster.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    dir: PathBuf,
}

impl Layout {
    pub(crate) fn new(dir: &Path) -> Result<Self, DevError> {
        let dir = std::path::absolute(dir).map_err(|source| DevError::File {
            action: "use",
            path: dir.to_path_buf(),
            source,
        })?;
        Ok(Layout { dir })
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn settings(&self) -> PathBuf {
        self.dir.join("dev.json")
    }

    pub(crate) fn endpoints(&self) -> PathBuf {
        self.dir.join("endpoints")
    }

    pub(crate) fn lock(&self) -> PathBuf {
        self.dir.join("lock")
    }

    pub(crate) fn control(&self) -> PathBuf {
        self.dir.join("control")
    }

    pub(crate) fn node(&self, node: u64) -> PathBuf {
        self.dir.join(format!("node-{node}"))
    }

    pub(crate) fn pid(&self, node: u64) -> PathBuf {
        self.node(node).join("pid")
    }

    pub(crate) fn log(&self, node: u64) -> PathBuf {
        self.node(node).join("log")
    }

    pub(crate) fn data(&self, node: u64) -> PathBuf {
        self.node(node).join("data")
    }

    pub(crate) fn create_dir(&self, path: &Path) -> Result<(), DevError> {
        fs::create_dir_all(path).map_err(|source| DevError::File {
            action: "create",
            path: path.to_path_buf(),
            source,
        })
    }

    /// Replaces a small file whole: readers see the old one or the new one.
    pub(crate) fn write(&self, path: &Path, content: &str) -> Result<(), DevError> {
        let part = path.with_extension("part");
        let write = || -> std::io::Result<()> {
            let mut file = fs::File::create(&part)?;
            file.write_all(content.as_bytes())?;
            file.sync_all()?;
            fs::rename(&part, path)
        };
        write().map_err(|source| DevError::File { action: "write", path: path.to_path_buf(), source })
    }
}

/// What a development cluster was created with. Kept in `dev.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Settings {
    pub(crate) nodes: u64,
    pub(crate) shards: u32,
    pub(crate) replicas: u32,
    pub(crate) base_port: u16,
    pub(crate) durability: Durability,
    pub(crate) server_args: Vec<String>,
    /// The cluster exists: it is never created again in this directory.
    pub(crate) created: bool,
}

impl Settings {
    /// The settings of the cluster in `layout`, when there is one.
    pub(crate) fn load(layout: &Layout) -> Result<Option<Self>, DevError> {
        let path = layout.settings();
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(DevError::File { action: "read", path, source }),
        };
        serde_json::from_str(&text).map(Some).map_err(|source| DevError::Settings { path, source })
    }

    /// The settings of the cluster in `layout`.
    pub(crate) fn existing(layout: &Layout) -> Result<Self, DevError> {
        Self::load(layout)?.ok_or_else(|| DevError::NoCluster { dir: layout.dir().to_path_buf() })
    }

    pub(crate) fn save(&self, layout: &Layout) -> Result<(), DevError> {
        let path = layout.settings();
        let text = serde_json::to_string_pretty(self)
            .map_err(|source| DevError::Settings { path: path.clone(), source })?;
        layout.write(&path, &(text + "\n"))
    }

    /// What `args` ask for, reconciled with what the directory's cluster already is.
    pub(crate) fn resolve(layout: &Layout, args: &DevArgs) -> Result<Self, DevError> {
        let settings = match Self::load(layout)? {
            Some(existing) => existing.keep(layout, args)?,
            None => {
                let nodes = args.nodes.unwrap_or(3);
                Settings {
                    nodes,
                    shards: args.shards.unwrap_or(8),
                    replicas: args.replicas.unwrap_or(u32::try_from(nodes.min(3)).unwrap_or(3)),
                    base_port: args.base_port.unwrap_or(7400),
                    durability: args.durability.unwrap_or(Durability::Fsync),
                    server_args: args.server_args.clone(),
                    created: false,
                }
            }
        };
        settings.validate()?;
        Ok(settings)
    }

    fn keep(mut self, layout: &Layout, args: &DevArgs) -> Result<Self, DevError> {
        let refuse = |field, existing: String, asked: Option<String>| match asked {
            Some(asked) if asked != existing => {
                Err(DevError::Contradiction { dir: layout.dir().to_path_buf(), field, existing, asked })
            }
            _ => Ok(()),
        };
        refuse("--nodes", self.nodes.to_string(), args.nodes.map(|n| n.to_string()))?;
        refuse("--shards", self.shards.to_string(), args.shards.map(|n| n.to_string()))?;
        refuse("--replicas", self.replicas.to_string(), args.replicas.map(|n| n.to_string()))?;
        refuse("--base-port", self.base_port.to_string(), args.base_port.map(|n| n.to_string()))?;
        refuse(
            "--durability",
            self.durability_flag().to_owned(),
            args.durability.map(|d| flag_of(d).to_owned()),
        )?;
        if !args.server_args.is_empty() {
            self.server_args.clone_from(&args.server_args);
        }
        Ok(self)
    }

    fn validate(&self) -> Result<(), DevError> {
        if u64::from(self.replicas) > self.nodes {
            return Err(DevError::Invalid {
                what: format!(
                    "--replicas {} needs as many nodes, but --nodes is {}",
                    self.replicas, self.nodes
                ),
            });
        }
        if u64::from(self.base_port) + 2 * self.nodes - 1 > u64::from(u16::MAX) {
            return Err(DevError::Invalid {
                what: format!(
                    "--base-port {} leaves no room for {} nodes, two ports each",
                    self.base_port, self.nodes
                ),
            });
        }
        Ok(())
    }

    pub(crate) fn durability_flag(&self) -> &'static str {
        flag_of(self.durability)
    }

    /// The gRPC port of a node of this cluster.
    pub(crate) fn grpc_port(&self, node: u64) -> u16 {
        // `validate` made sure that it fits.
        self.base_port + u16::try_from(2 * (node - 1)).unwrap_or(0)
    }

    pub(crate) fn http_port(&self, node: u64) -> u16 {
        self.grpc_port(node) + 1
    }

    pub(crate) fn address(&self, node: u64) -> String {
        format!("http://127.0.0.1:{}", self.grpc_port(node))
    }

    pub(crate) fn addresses(&self) -> Vec<String> {
        self.node_ids().map(|node| self.address(node)).collect()
    }

    pub(crate) fn node_ids(&self) -> impl Iterator<Item = u64> + use<> {
        1..=self.nodes
    }

    pub(crate) fn check_node(&self, node: u64) -> Result<(), DevError> {
        if (1..=self.nodes).contains(&node) {
            Ok(())
        } else {
            Err(DevError::UnknownNode { node, nodes: self.nodes })
        }
    }
}

fn flag_of(durability: Durability) -> &'static str {
    match durability {
        Durability::Fsync => "fsync",
        Durability::Memory => "memory",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(dir: &Path) -> DevArgs {
        DevArgs {
            nodes: None,
            shards: None,
            replicas: None,
            dir: dir.to_path_buf(),
            base_port: None,
            durability: None,
            ready_timeout: 120,
            end_with_stdin: false,
            server_args: Vec::new(),
            command: None,
        }
    }

    #[test]
    fn a_second_start_keeps_the_settings_of_the_first() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        let first = DevArgs { shards: Some(2), base_port: Some(9000), ..args(dir.path()) };
        Settings::resolve(&layout, &first).unwrap().save(&layout).unwrap();

        let second = Settings::resolve(&layout, &args(dir.path())).unwrap();
        assert_eq!((second.shards, second.base_port, second.nodes), (2, 9000, 3));

        let other = DevArgs { shards: Some(4), ..args(dir.path()) };
        let error = Settings::resolve(&layout, &other).unwrap_err();
        assert!(error.to_string().contains("--shards 2, not 4"), "{error}");
    }

    #[test]
    fn more_replicas_than_nodes_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        let asked = DevArgs { nodes: Some(2), replicas: Some(3), ..args(dir.path()) };
        assert!(matches!(Settings::resolve(&layout, &asked), Err(DevError::Invalid { .. })));
        let fewer = DevArgs { nodes: Some(2), ..args(dir.path()) };
        assert_eq!(Settings::resolve(&layout, &fewer).unwrap().replicas, 2);
    }

    #[test]
    fn ports_are_two_a_node() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        let settings = Settings::resolve(&layout, &args(dir.path())).unwrap();
        assert_eq!(
            settings.addresses().join(","),
            "http://127.0.0.1:7400,http://127.0.0.1:7402,http://127.0.0.1:7404"
        );
        assert_eq!(settings.http_port(3), 7405);
        let high = DevArgs { base_port: Some(65_533), ..args(dir.path()) };
        assert!(matches!(Settings::resolve(&layout, &high), Err(DevError::Invalid { .. })));
    }
}
