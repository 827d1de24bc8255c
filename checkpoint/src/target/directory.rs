//! What only a directory needs: removals that are durable, and leftovers of puts that died.
//!
//! Not here: puts, which the store makes durable by itself.

use std::path::Path;
use std::time::{Duration, SystemTime};

use super::{Target, TargetError};

const FOLDERS: [&str; 4] = ["files", "manifests", "writing", "pruning"];

impl Target {
    /// Makes durable what was removed from a folder. A bucket's removals are.
    pub(crate) async fn sync_removals(&self, folder: &'static str) -> Result<(), TargetError> {
        self.on_disk("sync", folder, move |directory| match std::fs::File::open(directory.join(folder)) {
            Ok(folder) => folder.sync_all(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
        })
        .await
    }

    /// Removes what puts left that died on their way (`<name>#<number>`, which no listing shows), longer ago than `age`.
    pub(crate) async fn remove_staged(&self, age: Duration) -> Result<(), TargetError> {
        for folder in FOLDERS {
            self.on_disk("tidy", folder, move |directory| remove_staged(&directory.join(folder), age))
                .await?;
        }
        Ok(())
    }

    async fn on_disk(
        &self,
        action: &'static str,
        folder: &'static str,
        work: impl FnOnce(&Path) -> std::io::Result<()> + Send + 'static,
    ) -> Result<(), TargetError> {
        let Some(directory) = self.directory.clone() else { return Ok(()) };
        let done = tokio::task::spawn_blocking(move || work(&directory)).await;
        let done = done.unwrap_or_else(|error| Err(std::io::Error::other(error)));
        done.map_err(|error| TargetError::Store {
            target: self.url.to_string(),
            action,
            path: folder.to_owned(),
            reason: error.to_string(),
        })
    }
}

fn is_staged(name: &str) -> bool {
    let number = name.rsplit_once('#').map(|(_, number)| number);
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

fn remove_staged(folder: &Path, age: Duration) -> std::io::Result<()> {
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries {
        let entry = entry?;
        if !entry.file_name().to_str().is_some_and(is_staged) {
            continue;
        }
        // Whoever writes it may have ended meanwhile: then it is not there, which is as well.
        let modified = match entry.metadata().and_then(|meta| meta.modified()) {
            Ok(modified) => modified,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        let is_old = SystemTime::now().duration_since(modified).is_ok_and(|found| found >= age);
        match if is_old { std::fs::remove_file(entry.path()) } else { Ok(()) } {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn leftovers_of_puts_go_and_nothing_else() {
        let home = tempfile::TempDir::new().expect("a folder");
        let target = Target::create(&format!("file://{}", home.path().display())).expect("a target");
        std::fs::create_dir(home.path().join("files")).expect("created");
        for name in ["a.run#1", "a.run#12", "a.run", "b#", "c#1x", "#mine"] {
            std::fs::write(home.path().join("files").join(name), "x").expect("written");
        }
        let names = || {
            let entries = std::fs::read_dir(home.path().join("files")).expect("listed");
            let mut names: Vec<String> = entries
                .map(|entry| entry.expect("an entry").file_name().into_string().expect("text"))
                .collect();
            names.sort();
            names
        };
        target.remove_staged(Duration::from_secs(3600)).await.expect("removed");
        assert_eq!(names().len(), 6, "they are young");
        target.remove_staged(Duration::ZERO).await.expect("removed");
        assert_eq!(names(), ["#mine", "a.run", "b#", "c#1x"]);
    }
}
