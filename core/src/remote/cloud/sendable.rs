//! Checks of settings and credentials before the clients get them: a client panics if a value does
//! not fit into a header or a URL. Messages name a value and never show it.

use crate::{Error, Result};

/// How a value is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// In a header, as a key id or a token.
    InHeader,
    /// Never, as a secret key, which signs.
    Never,
    /// As a part of a host, as a region or an account.
    InHost,
    /// As a URL.
    AsUrl,
}

/// Variables that the clients of a cloud read.
pub(super) const AWS_CREDENTIALS: [(&str, Sent); 4] = [
    ("AWS_ACCESS_KEY_ID", Sent::InHeader),
    ("AWS_SECRET_ACCESS_KEY", Sent::Never),
    ("AWS_SESSION_TOKEN", Sent::InHeader),
    ("AWS_TOKEN", Sent::InHeader),
];
pub(super) const AWS_SETTINGS: [(&str, Sent); 5] = [
    ("AWS_REGION", Sent::InHost),
    ("AWS_DEFAULT_REGION", Sent::InHost),
    ("AWS_SSE_KMS_KEY_ID", Sent::InHeader),
    ("AWS_ENDPOINT_URL_STS", Sent::AsUrl),
    ("AWS_METADATA_ENDPOINT", Sent::AsUrl),
];
pub(super) const GOOGLE_CREDENTIALS: [(&str, Sent); 1] = [("GOOGLE_BEARER_TOKEN", Sent::InHeader)];
pub(super) const AZURE_CREDENTIALS: [(&str, Sent); 6] = [
    ("AZURE_STORAGE_TOKEN", Sent::InHeader),
    ("AZURE_STORAGE_SAS_TOKEN", Sent::InHeader),
    ("AZURE_STORAGE_SAS_KEY", Sent::InHeader),
    ("AZURE_STORAGE_ACCOUNT_KEY", Sent::Never),
    ("AZURE_STORAGE_ACCESS_KEY", Sent::Never),
    ("AZURE_STORAGE_CLIENT_SECRET", Sent::Never),
];
pub(super) const AZURE_SETTINGS: [(&str, Sent); 1] = [("AZURE_STORAGE_ACCOUNT_NAME", Sent::InHost)];

/// Returns what is wrong with a value, without the value. An empty one is not sent.
pub(super) fn flaw(value: &str, sent: Sent) -> Option<&'static str> {
    let is_line_break = |sign: char| sign == '\n' || sign == '\r';
    if value.ends_with(is_line_break) {
        return Some("ends in a line break");
    }
    if value.chars().any(is_line_break) {
        return Some("has a line break");
    }
    if value.trim() != value {
        return Some("begins or ends with a space");
    }
    if value.chars().any(char::is_control) {
        return Some("has a control character");
    }
    if sent != Sent::Never && !value.is_ascii() {
        return Some("has a character that is not ASCII");
    }
    match sent {
        Sent::InHost if !value.bytes().all(is_of_host) => {
            Some("has a character other than letters, digits, `-`, `_` and `.`")
        }
        Sent::AsUrl if !value.is_empty() => url_flaw(value),
        _ => None,
    }
}

fn is_of_host(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-_.".contains(&byte)
}

fn url_flaw(url: &str) -> Option<&'static str> {
    let Some(rest) = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://")) else {
        let has_secret = url.contains('@');
        return Some(if has_secret { "is no URL, and has an `@`" } else { "is no URL, as https://host is" });
    };
    if rest.contains('@') {
        return Some("has a user or a password");
    }
    if rest.contains(['?', '#']) {
        return Some("has a query");
    }
    let authority = rest.split('/').next().unwrap_or_default();
    // An address of IPv6 has colons of its own.
    let (host, port) = match authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, rest)) => {
            (address, rest.strip_prefix(':').or_else(|| (!rest.is_empty()).then_some("x")))
        }
        None => authority.split_once(':').map_or((authority, None), |(host, port)| (host, Some(port))),
    };
    let is_host = |byte: u8| is_of_host(byte) || (authority.starts_with('[') && byte == b':');
    if host.is_empty() || !host.bytes().all(is_host) {
        return Some("has no valid host");
    }
    if port.is_some_and(|port| port.parse::<u16>().is_err()) {
        return Some("has no valid port");
    }
    (!rest.bytes().all(|byte| byte.is_ascii_graphic())).then_some("has a space")
}

/// Refuses a value that cannot be sent.
pub(super) fn check(url: &str, name: &str, value: &str, sent: Sent) -> Result<()> {
    match flaw(value, sent) {
        Some(flaw) => Err(Error::Misuse(format!("{url}: {name} {flaw}. Set it again without that"))),
        None => Ok(()),
    }
}

/// Refuses variables that cannot be sent.
pub(super) fn check_variables(url: &str, variables: &[(&str, Sent)]) -> Result<()> {
    for &(name, sent) in variables {
        let Some(value) = std::env::var_os(name) else { continue };
        let Some(value) = value.to_str() else {
            return Err(Error::Misuse(format!("{url}: the variable {name} is not UTF-8. Set it again")));
        };
        check(url, &format!("the variable {name}"), value, sent)?;
    }
    Ok(())
}

/// Refuses the name of a bucket or a container that no URL can have.
pub(super) fn check_bucket(url: &str, name: &str) -> Result<()> {
    if name.bytes().all(|byte| is_of_host(byte) || b"@:$".contains(&byte)) {
        return Ok(());
    }
    Err(Error::Misuse(format!(
        "{url:?}: the name of a bucket has letters, digits, `-`, `_` and `.` only. Pass its exact name"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_no_header_takes_are_flawed() {
        for value in ["key\n", "k\ney", "k\rey", " key", "key ", "k\0ey", "k\u{7f}ey", "kéy"] {
            assert!(flaw(value, Sent::InHeader).is_some(), "{value:?}");
        }
        assert_eq!(flaw("key\n", Sent::Never), Some("ends in a line break"));
        assert_eq!(flaw("AKIA+/=", Sent::InHeader), None);
        // It signs only. Some servers let their users choose it.
        assert_eq!(flaw("sécret with spaces", Sent::Never), None);
        assert!(flaw("not a region", Sent::InHost).is_some());
        assert_eq!(flaw("us-east-1", Sent::InHost), None);
    }

    #[test]
    fn endpoints_have_a_host_and_no_secrets() {
        for url in ["http://127.0.0.1:9000", "https://host", "https://host/account/", "http://[::1]:80/", ""]
        {
            assert_eq!(flaw(url, Sent::AsUrl), None, "{url}");
        }
        for url in [
            "host:1",
            "http://",
            "http://:80",
            "http://user:pw@host",
            "htt://user:pw@host",
            "http://host?sig=x",
            "http://ho st",
            "http://host:99999",
            "http://host:x",
            "http://[::1",
            "http://host/a b",
        ] {
            assert!(flaw(url, Sent::AsUrl).is_some(), "{url}");
        }
    }

    #[test]
    fn messages_name_values_and_do_not_show_them() {
        let error = check("s3://bucket", "the endpoint", "http://u:wonderful@host", Sent::AsUrl).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("the endpoint has a user or a password") && !text.contains("wonderful"),
            "{text}"
        );
        check_bucket("s3://buck et", "buck et").unwrap_err();
        check_bucket("abfss://c@account.dfs.core.windows.net", "c@account.dfs.core.windows.net").unwrap();
    }
}
