//! Leaves out of a text what may be secret.
//!
//! Two nets: values of the environment that are credentials go wherever they stand, and so does what stands behind a word like
//! "token" or "authorization" and behind the question mark of an address. Rather too much is left out than too little.

/// A value that is shorter is no secret, and would be found in every other word.
const SECRET_CHARACTERS_MIN: usize = 6;
const HIDDEN: &str = "<hidden>";
/// What follows one of these is left out.
const TELLTALES: [&str; 9] = [
    "secret",
    "token",
    "signature",
    "authorization",
    "password",
    "accountkey",
    "credential",
    "accesskey",
    "sig=",
];
/// These stand between "authorization" and what is secret.
const SCHEMES: [&str; 4] = ["bearer", "basic", "sharedkey", "aws4-hmac-sha256"];

/// Leaves out of a text what may be secret.
pub(super) fn redact(text: &str) -> String {
    hide(
        text,
        &secrets(
            std::env::vars_os()
                .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?))),
        ),
    )
}

/// Values of variables that are credentials, the longest first.
fn secrets(variables: impl Iterator<Item = (String, String)>) -> Vec<String> {
    let is_secret = |name: &str| {
        let is_ours = ["AWS_", "GOOGLE_", "AZURE_"].iter().any(|start| name.starts_with(start));
        let marks = ["SECRET", "TOKEN", "KEY", "PASSWORD", "SAS", "CREDENTIAL", "SERVICE_ACCOUNT"];
        is_ours && marks.iter().any(|mark| name.contains(mark))
    };
    let values = variables.filter(|(name, _)| is_secret(&name.to_ascii_uppercase())).map(|(_, value)| value);
    let mut secrets: Vec<String> = values.filter(|value| value.len() >= SECRET_CHARACTERS_MIN).collect();
    secrets.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
    secrets
}

fn hide(text: &str, secrets: &[String]) -> String {
    let mut text = text.to_owned();
    for secret in secrets {
        text = text.replace(secret.as_str(), HIDDEN);
    }
    let (mut shown, mut hide_next) = (Vec::new(), false);
    for word in text.split_whitespace() {
        let plain = word.to_ascii_lowercase();
        let has_telltale = TELLTALES.iter().any(|telltale| plain.contains(telltale));
        let is_scheme =
            SCHEMES.contains(&plain.trim_matches(|c: char| !c.is_ascii_alphanumeric() && c != '-'));
        let ends_open = plain.ends_with([':', '=']);
        if hide_next || is_scheme || (has_telltale && plain.contains([':', '=', '>'])) {
            shown.push(HIDDEN.to_owned());
            // "Authorization: Bearer x", "\"token\": \"x\"", "token = x".
            hide_next =
                is_scheme || (ends_open && (has_telltale || hide_next)) || (hide_next && plain == "=");
        } else if has_telltale {
            shown.push(word.to_owned());
            hide_next = false;
            // "token = x": what is secret stands behind the sign, which is a word of its own.
        } else if plain == "=" || plain == ":" {
            let after_telltale = shown.last().is_some_and(|last: &String| {
                let last = last.to_ascii_lowercase();
                TELLTALES.iter().any(|telltale| last.contains(telltale))
            });
            shown.push(word.to_owned());
            hide_next = after_telltale;
        } else {
            shown.push(without_query(word));
        }
    }
    shown.join(" ")
}

/// An address without user, password, and what stands behind its question mark.
fn without_query(word: &str) -> String {
    let Some((scheme, rest)) = word.split_once("://") else { return word.to_owned() };
    let (rest, query) = rest.split_once('?').map_or((rest, ""), |(rest, _)| (rest, "?<hidden>"));
    let host_end = rest.find('/').unwrap_or(rest.len());
    let host = rest[..host_end].rsplit_once('@').map_or(&rest[..host_end], |(_, host)| host);
    format!("{scheme}://{host}{}{query}", &rest[host_end..])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_stands_behind_a_telltale_is_left_out() {
        for text in [
            "GET https://s3/bucket/x?X-Amz-Signature=hunter2 failed",
            "AccountKey=hunter2 forbidden",
            "Authorization: Bearer hunter2 was sent",
            "authorization: hunter2",
            "{\"token\": \"hunter2\"}",
            "{\"token\":\"hunter2\"}",
            "<SecretKey>hunter2</SecretKey>",
            "password = hunter2",
            "token : hunter2",
            "https://me:hunter2@host/path",
            "line one\nx-amz-security-token:\thunter2\nline three",
            "Authorization: AWS4-HMAC-SHA256 Credential=hunter2/x",
        ] {
            let shown = hide(text, &[]);
            assert!(!shown.contains("hunter2"), "{text:?} shows {shown:?}");
        }
    }

    #[test]
    fn what_is_not_secret_is_shown() {
        for text in [
            "No such file or directory (os error 2)",
            "https://s3/bucket/x is not there",
            "connection refused",
        ] {
            assert_eq!(hide(text, &[]), text);
        }
        assert!(hide("GET https://s3/b?x=1 failed: AccountKey=k forbidden", &[]).ends_with("forbidden"));
    }

    #[test]
    fn credentials_of_the_environment_are_known() {
        let variables = [
            ("AWS_SECRET_ACCESS_KEY", "long-and-secret"),
            ("aws_session_token", "longer-and-secret"),
            ("AZURE_STORAGE_SAS_KEY", "sas-secret"),
            ("AWS_REGION", "eu-central-1"),
            ("AWS_ACCESS_KEY_ID", "abc"),
            ("PATH", "/usr/secret/bin"),
        ];
        let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(secrets(variables.into_iter()), ["longer-and-secret", "long-and-secret", "sas-secret"]);
    }

    proptest! {
        #[test]
        fn a_credential_is_in_no_text(before in "[ -~\n]{0,40}", after in "[ -~\n]{0,40}", secret in "[A-Za-z0-9/+]{6,40}") {
            prop_assume!(!before.contains(&secret) && !after.contains(&secret) && !"<hidden>".contains(&secret));
            let shown = hide(&format!("{before}{secret}{after}"), std::slice::from_ref(&secret));
            prop_assert!(!shown.contains(&secret), "{}", shown);
        }
    }
}
